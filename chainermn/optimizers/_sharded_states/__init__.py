"""Sharded optimizer states: each rank stores one shard."""
