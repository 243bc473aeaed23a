"""How modules of Chainer are changed while they are imported, without changing its files."""
