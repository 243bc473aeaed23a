"""Errors of ranks: raised on all of them, and printed once."""
