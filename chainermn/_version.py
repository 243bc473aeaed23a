"""The version of this package. It is defined only here; see docs/releasing.md."""

__version__ = '8.0.0.dev0'
