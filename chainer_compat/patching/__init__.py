"""How Chainer modules are changed while they are imported, without changing its files."""
