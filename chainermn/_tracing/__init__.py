"""Timelines: what each rank does when."""
