"""Devices for tests that run on several ranks."""
from chainermn.testing.device import get_device

__all__ = ['get_device']
