"""Proxies of Chainer's objects, with a few methods of their own."""
