"""Gradients of a model: collection, compression, and averaging in the background."""
