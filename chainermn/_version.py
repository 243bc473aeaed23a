"""The version of this package; pyproject.toml reads it from here."""

__version__ = '8.0.0.dev0'
