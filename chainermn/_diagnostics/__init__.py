"""Detect and report failures, hangs and mismatched shutdowns of ranks."""
