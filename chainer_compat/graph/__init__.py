"""Chainer's computational graph, with less Python overhead for calls of functions and links."""
