"""Deadlocks: ranks that wait for each other."""
