"""Names that NumPy, CuPy and Python removed, but that existing programs use."""
