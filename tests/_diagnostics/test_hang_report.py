"""The report of a hang is short for any number of ranks, and shows which ranks differ."""

import pickle
import re

import pytest
from simulated_ranks import chain, different, in_collective, one_missing, ring, two_groups

from chainermn._diagnostics import hang_report, stall_warning

pytestmark = pytest.mark.mpi_skip

SIZES = 100, 1024


def report(ranks, silent=(), per_host=8):
    size = len(ranks)
    return hang_report.text({each.rank: each.response for each in ranks
                             if each.rank not in silent}, range(size),
                            hosts=[f'node{rank // per_host}' for rank in range(size)])


def check_size(text):
    lines = text.splitlines()
    assert len(lines) <= 38, text
    assert max(map(len, lines)) <= 210, text


@pytest.mark.slow
@pytest.mark.parametrize('size', SIZES)
@pytest.mark.parametrize('job', [one_missing, ring, chain, two_groups, different])
def test_a_report_of_many_ranks_is_short(job, size):
    text = report(job(size))
    check_size(text)
    assert '\nLast operations:\n' in text and '\nStacks of rank' in text


def test_the_rank_that_differs_comes_first():
    lines = report(one_missing(1024)).splitlines()
    assert lines[0].startswith('  rank 341 is not in an operation: it is at train.py:30 in load()')
    assert lines[1] == ("  ranks 0-340, 342-1023 are in allreduce #7 float32 (1000,) op='sum', "
                        'called at train.py:8 in main() (for 60-61 s)')
    stacks = [line for line in lines if line.startswith('Stacks of ')]
    assert stacks == [
        'Stacks of rank 341 (most recent call last):',
        'Stacks of ranks 0-340, 342-1023 (most recent call last; of rank 0):']
    assert '  File "train.py", line 30, in load' in lines


def test_states_that_differ_on_each_rank_only_in_their_peers_share_a_line():
    text = report(ring(1024))
    assert text.startswith('  ranks 0-1023 are in recv, called at train.py:8 in main() (')
    assert '  rank 0, communicator of ranks 0-1023: recv #1 from rank 1 tag 5\n' in text
    assert '  ... and 1017 more groups (1017 ranks)\n' in text


def test_other_states_are_counted():
    lines = report(different(1024)).splitlines()
    assert lines[0].startswith('  rank 0 is not in an operation: it is at train.py:0 in f0()')
    assert lines[8] == '  ... and 1016 more groups (1016 ranks)'


def test_few_ranks_are_shown_with_all_details():
    text = report(different(16))
    for rank in range(16):
        assert f'  rank {rank} is not in an operation: it is at train.py:{rank} in ' in text
        assert f'  rank {rank}, communicator of ranks 0-15: barrier #{rank}\n' in text
    assert text.count('\nStacks of rank ') == 8
    assert text.count('\nThread loader:\n') == 8
    assert text.count('  File "train.py", line 3, in f3\n    f4()\n') == 8
    assert '\n... and 8 more groups (8 ranks)\n' in text


def test_calls_that_do_not_fit_are_the_oldest_ones():
    ranks = [in_collective(1024, rank, 60) for rank in range(1024)]
    line = next(line for line in report(ranks).splitlines() if 'bcast #59' in line)
    assert line.startswith('  ranks 0-1023, communicator of ranks 0-1023: ...; ')
    assert line.endswith('; bcast #59 float32 (1000,), called at train.py:5')


@pytest.mark.parametrize('size', SIZES)
def test_hosts_that_do_not_answer(size):
    text = report(one_missing(size), silent={0, *range(16, size)}, per_host=16)
    check_size(text)
    assert ('  rank 0 does not respond: the rank is stopped, or runs code that holds the GIL\n'
            in text)
    assert re.search(r'\n  ranks \d+-\d+ on (node\d+) do not respond: host \1 may be unreachable',
                     text)
    assert re.search(r'\n  \.\.\. and \d+ more groups', text)
    text = report(one_missing(size), silent=range(size // 2))
    check_size(text)


@pytest.mark.parametrize('size', SIZES)
@pytest.mark.parametrize(('job', 'expected'), [
    (one_missing, '  rank {third} is not in an operation: it is at train.py:30 in load(); '),
    (chain, '  rank {last} is not in an operation: it is at train.py:30 in load(); '),
])
def test_a_stall_warning_of_many_ranks_is_short(job, expected, size):
    ranks = job(size)
    text = stall_warning.text(
        {each.rank: each.state for each in ranks if each.state.threads[0].waits},
        {each.rank: each.response for each in ranks}, 60)
    check_size(text)
    assert expected.format(third=size // 3, last=size - 1) in text


def test_the_size_of_a_response_does_not_depend_on_the_number_of_ranks():
    small, large = (len(pickle.dumps(one_missing(size)[-1].response)) for size in (100, 4000))
    assert large < small + 50
