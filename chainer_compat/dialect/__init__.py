"""Support for programs, snapshots and pickles of Chainer 1 to 6."""
