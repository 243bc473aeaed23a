"""For tests of programs that use several ranks."""
from chainermn.testing.device import get_device

__all__ = ['get_device']
