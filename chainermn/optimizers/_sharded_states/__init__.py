"""Sharded optimizer states: each rank keeps one shard."""
