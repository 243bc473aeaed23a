"""Programs, snapshots and pickles of Chainer 1 to 6: what they use that 7.8.1 does not have."""
