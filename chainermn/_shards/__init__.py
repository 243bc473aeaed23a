"""Shards: files of samples, their readers, and the order in which ranks use the samples."""
