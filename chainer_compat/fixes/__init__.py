"""Faults of Chainer 7.8.1, and what changed in the packages that it uses. One module per cause."""
