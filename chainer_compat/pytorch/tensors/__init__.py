"""Conversion between arrays and tensors: their memory, memory format and dtype."""
