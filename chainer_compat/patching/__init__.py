"""Changes Chainer's modules while they are imported, without changing its files."""
