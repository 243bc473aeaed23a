"""Fixes for bugs in Chainer 7.8.1 and for changes in the packages that it uses, by cause."""
