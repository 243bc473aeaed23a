"""Arrays as tensors and back: their memory, memory format and dtype."""
