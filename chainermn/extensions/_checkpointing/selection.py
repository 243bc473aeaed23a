"""Selects the checkpoint to resume from: the newest one that is complete on all ranks."""
from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import NamedTuple

from chainermn._operations.on_all_ranks import on_all_ranks, raise_together
from chainermn._operations.ranks import group_ranks, ranks_text
from chainermn._process import event
from chainermn._process.program_place import program_place
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions._checkpointing.rank_file import Tag, find_problem, needs_others, read_tag
from chainermn.extensions._checkpointing.save_names import SaveNames


class Selection(NamedTuple):
    """The checkpoint to resume from, on this rank."""

    iteration: int
    path: str | None  # the file that this rank reads, if it reads one
    size: int | None  # number of ranks of the job that saved it; None if unknown
    is_for_all: bool  # whether rank 0 reads for all ranks
    are_buffers_equal: bool = True  # False if rank 0 reads for all ranks, whose buffers differ
    paths: tuple[str, ...] = ()  # the files that rank 0 merges if it reads for all ranks


class _VerifiedFile(NamedTuple):
    """One file of a checkpoint that a different number of ranks will load."""

    problem: str | None
    state: str = ''  # see Tag
    buffers: str = ''


def select(comm: CommunicatorBase, names: SaveNames, writers: Sequence[int], title: str = ''
           ) -> Selection | None:
    """Find the newest checkpoint that is complete on all ranks. Collective: every rank calls it.

    The first file lists the ranks that wrote the checkpoint. A checkpoint is complete if each of
    these ranks has an undamaged file with the same tag. Files of ChainerMN 7 have no tag; for them,
    each rank must have an undamaged file.

    Args:
        comm: ChainerMN communicator.
        names: Names of the files.
        writers: The ranks that write files now; rank 0 is the first.
        title: Name of the checkpoints and their folder. If it is not empty, rank 0 logs that there
            is no checkpoint.

    Returns:
        The checkpoint; ``None`` on all ranks if there is none.

    Raises:
        ValueError: On every rank, if the newest checkpoint has a different number of writers, and
            their models or optimizers differed.

    Warns:
        RuntimeWarning: On rank 0, for each checkpoint that is skipped.
    """
    mine: list[int] = []
    with raise_together(comm, 'loading'):
        if comm.rank in writers:
            mine = list(names.find(comm.rank))
    # Ask all ranks, because the file of any rank may be missing. Checkpoints that were removed as
    # obsolete are older than a complete one, so the loop does not reach them.
    numbers = sorted(set[int]().union(*comm.allgather_obj(mine)), reverse=True)
    for number in numbers:
        selection, problems = _try(comm, names, writers, number)
        if selection is not None:
            return selection
        if comm.rank == 0:
            warnings.warn_explicit(f'skipped iteration {number}\n  ' + '\n  '.join(problems),
                                   RuntimeWarning, *program_place())
    if title and comm.rank == 0:
        if numbers:
            event.tell('No usable checkpoint of %s (%d %s skipped): starting from the beginning',
                       title, len(numbers), 'was' if len(numbers) == 1 else 'were')
        else:
            event.tell('No checkpoint of %s: starting from the beginning', title)
    return None


def _try(comm: CommunicatorBase, names: SaveNames, writers: Sequence[int], number: int
         ) -> tuple[Selection | None, list[str]]:
    """Verify the files of a checkpoint.

    Returns:
        The selection, or ``None`` and the problems.
    """
    first, problem = None, None
    if comm.rank == 0:
        path = names.path(number, 0)
        try:
            first = read_tag(path)
        except FileNotFoundError:
            problem = f'rank 0: {path}: the file is missing'
        except Exception as error:
            problem = f'rank 0: {path}: {str(error) or type(error).__name__}'
    first, problem = comm.bcast_obj((first, problem))
    if problem is not None:
        return None, [problem]
    if first is None or len(first.writers) == len(writers):
        return _select_own_files(comm, names, writers, number, first)
    return _select_for_all(comm, names, writers, number, first)


def _select_own_files(comm: CommunicatorBase, names: SaveNames, writers: Sequence[int],
                      number: int, first: Tag | None) -> tuple[Selection | None, list[str]]:
    path = problem = None
    if comm.rank in writers:
        rank = comm.rank if first is None else first.writers[writers.index(comm.rank)]
        path = names.path(number, rank)
        problem = find_problem(path, rank, first)
        if first is None and os.path.exists(names.path(number, comm.size)):
            problem = (f'{path}: there is also a file of rank {comm.size}; start as many ranks as '
                       'in the saved run')
    if problems := [f'rank {rank}: {problem}' for rank, problem
                    in enumerate(comm.allgather_obj(problem)) if problem is not None]:
        return None, problems
    if first is None:
        return Selection(number, path, None, False), []
    return Selection(first.iteration, path, first.size, False), []


def _select_for_all(comm: CommunicatorBase, names: SaveNames, writers: Sequence[int], number: int,
                    first: Tag) -> tuple[Selection | None, list[str]]:
    files: dict[int, _VerifiedFile] = {}
    for ranks in (first.writers[comm.rank::comm.size], first.writers):
        with raise_together(comm, 'loading'):
            mine = {rank: _verify(names.path(number, rank), rank, first) for rank in ranks
                    if rank not in files and os.path.exists(names.path(number, rank))}
        for part in comm.allgather_obj(mine):
            files.update(part)
        if len(files) == len(first.writers):
            break  # otherwise, other ranks may have the rest in folders that are not shared
    for rank in first.writers:
        files.setdefault(rank, _VerifiedFile(f'{names.path(number, rank)}: the file is missing'))
    if problems := [f'rank {rank}: {file.problem}' for rank, file in sorted(files.items())
                    if file.problem is not None]:
        return None, problems
    groups = group_ranks((rank, file.state) for rank, file in sorted(files.items()))
    if len(groups) > 1:
        raise on_all_ranks(comm, ValueError(
            f'iteration {first.iteration} in {names.folder} was not loaded: the saved states '
            f'differ between ranks. {first.size} ranks saved it in {len(files)} files, but this '
            f'job has {comm.size} ranks and needs {len(writers)} files.\n'
            + ''.join(f'  {ranks_text(same)} '
                      f'{"has its own" if len(same) == 1 else "have the same"} state\n'
                      for same in groups.values())
            + f'Start {first.size} ranks.'))
    paths = [names.path(number, rank) for rank in first.writers]
    problems = []
    with raise_together(comm, 'loading'):
        if comm.rank == 0:
            if not needs_others(paths[0]):
                del paths[1:]  # any single file is sufficient
            problems = [f'rank 0: {path}: the file is missing' for path in paths
                        if not os.path.exists(path)]
    if problems := comm.bcast_obj(problems):
        return None, problems
    return Selection(first.iteration, paths[0], first.size, True,
                     len({file.buffers for file in files.values()}) == 1, tuple(paths)), []


def _verify(path: str, rank: int, first: Tag) -> _VerifiedFile:
    problem = find_problem(path, rank, first)
    tag = read_tag(path) if problem is None else None
    return _VerifiedFile(problem) if tag is None else _VerifiedFile(None, tag.state, tag.buffers)
