"""Optimizer states of which each rank keeps one shard."""
