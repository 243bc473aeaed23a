"""Ranks compare their calls before data moves; a mismatch raises the same error on all of them."""
