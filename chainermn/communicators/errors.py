"""Context managers that raise the error of one rank on all ranks.

Without them, the other ranks would wait for the rank that failed.
"""
from chainermn._operations.on_all_ranks import check_equal, raise_on_all_ranks, raise_together

__all__ = ['check_equal', 'raise_on_all_ranks', 'raise_together']
