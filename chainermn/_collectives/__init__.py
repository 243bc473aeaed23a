"""One module per family of operations."""
