"""Reads and compares the records that :class:`chainermn.extensions.RunRecord` writes."""
