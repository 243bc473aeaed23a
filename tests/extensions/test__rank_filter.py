"""Log messages of rank 0 only, except warnings and errors."""
import io
import logging

import chainermn


def shown(rank_filter):
    """What a handler with the filter shows of a message of each level."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter('%(rank)d %(levelname)s'))
    handler.addFilter(rank_filter)
    logger = logging.Logger('test')
    logger.addHandler(handler)
    for level in logging.INFO, logging.WARNING, logging.ERROR:
        logger.log(level, 'message')
    return stream.getvalue().split('\n')[:-1]


def test_rank_0_and_warnings_of_all_ranks(comm):
    found = comm.allgather_obj(shown(chainermn.RankFilter(comm)))
    assert found == [
        [f'{rank} {level}' for level in ('INFO', 'WARNING', 'ERROR')[rank > 0:]]
        for rank in range(comm.size)]


def test_other_ranks_and_levels(comm):
    last = comm.size - 1
    found = comm.allgather_obj(shown(chainermn.RankFilter(
        comm, ranks=[last], level=logging.ERROR)))
    assert found[:last] == [[f'{rank} ERROR'] for rank in range(last)]
    assert len(found[last]) == 3
