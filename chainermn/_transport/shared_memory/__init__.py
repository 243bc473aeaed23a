"""Sums and broadcasts in memory that the ranks of a node share."""
