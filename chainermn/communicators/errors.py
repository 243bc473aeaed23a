"""An error of one rank is raised on all ranks: contexts for code that may fail on one of them.

Without these, the other ranks would wait for the rank that failed.
"""
from chainermn._operations.on_all_ranks import check_equal, raise_on_all_ranks, raise_together

__all__ = ['check_equal', 'raise_on_all_ranks', 'raise_together']
