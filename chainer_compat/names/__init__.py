"""Names that NumPy and Python removed, and old programs use."""
