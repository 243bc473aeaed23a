"""Ranks compare their calls before data moves. A mismatch raises the same error on all ranks."""
