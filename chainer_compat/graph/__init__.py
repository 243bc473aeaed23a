"""Chainer's computational graph: calls of functions and links with less time in Python."""
