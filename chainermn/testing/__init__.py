"""Devices for tests of programs with several ranks."""
from chainermn.testing.device import get_device

__all__ = ['get_device']
