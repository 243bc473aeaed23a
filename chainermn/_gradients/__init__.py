"""Gradients of a model: listed, packed, compressed, averaged in the background."""
