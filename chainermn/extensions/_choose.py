"""The ranks choose together what to resume from: the newest save that is whole on all of them."""
from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from chainermn.extensions._arrays import problem_of, tag_of
from chainermn.extensions._commit import Commit, File, Names, digest
from chainermn.extensions._saver import on_all_ranks
from chainermn.extensions._snapshot_files import Tag, Written


class Choice(NamedTuple):
    """What to resume from, on this rank."""

    iteration: int
    path: str | None  # the file that this rank reads, if it reads one
    size: int | None  # ranks of the job that saved it; None if it does not say
    is_for_all: bool  # whether rank 0 reads for all ranks
    are_buffers_equal: bool = True  # of the replicas, if rank 0 reads for all


class _Listed(NamedTuple):
    """What rank 0 found of one iteration."""

    iteration: int
    commit: Commit | None
    tag: Tag | None
    problem: str | None


class _Said(NamedTuple):
    """What a rank found out about its file of an iteration, which has no commit file."""

    rank: int
    missing: bool = False
    problem: str | None = None
    save: str = ''
    file: File | None = None


def choose(comm: Any, names: Names, writers: Sequence[int]) -> Choice | None:
    """Finds the newest save that is whole on all ranks.  Collective: every rank calls it.

    Those with a commit file have to be as it says.  Those whose files say that they belong together
    (the job ended before it could commit them) are committed now, if all are whole.  Only if there
    is neither, files of older versions are taken.

    Args:
        comm: ChainerMN communicator.
        names: Of the files.
        writers: The ranks that write files now.

    Returns:
        What to load; ``None`` if there is nothing, the same on all ranks.

    Raises:
        ValueError: On every rank, if the newest was saved by another number of writers, and their
            models or optimizers differed.

    Warns:
        RuntimeWarning: On rank 0, of each save that was passed over.
    """
    listed: list[_Listed] = []
    if comm.rank == 0:
        with on_all_ranks(comm, 'loading'):
            listed = _list(names)
    listed = [_Listed(*one) for one in comm.bcast_obj([tuple(one) for one in listed])]
    choice, said = None, False
    for one in listed:
        if one.commit is None and one.tag is None and one.problem is None:
            continue  # of an older version
        commit, problems = one.commit, [one.problem] if one.problem else []
        if one.tag is not None:
            commit, problems = _completed(comm, names, writers, one.iteration, one.tag)
        if commit is not None:
            choice, problems = _verified(comm, names, writers, commit)
            if choice is not None:
                return choice
        said = said or bool(problems)
        _warn(comm, one.iteration, problems)
    choice, more = _of_older_version(comm, names, writers, {
        one.iteration for one in listed if one.commit or one.tag or one.problem})
    if choice is None and listed and comm.rank == 0 and not (said or more):
        warnings.warn(f'no save in {names.folder} is whole on all ranks; nothing was loaded',
                      RuntimeWarning, stacklevel=3)
    return choice


def _list(names: Names) -> list[_Listed]:
    """Lists what rank 0 has, newest first."""
    commits, files = names.find(None), names.find(0)
    listed = []
    for iteration in sorted({*commits, *files}, reverse=True):
        commit = tag = problem = None
        path = commits.get(iteration) or files[iteration]
        try:
            if iteration in commits:
                commit = Commit.read(path)
                if commit.files[0].name != names.make(iteration, commit.files[0].rank):
                    commit, problem = None, f'{path}: is of another save'
            else:
                tag = tag_of(path)
        except Exception as error:
            problem = f'rank 0: {path}: {str(error) or type(error).__name__}'
        listed.append(_Listed(iteration, commit, tag, problem))
    return listed


def _completed(comm: Any, names: Names, writers: Sequence[int], iteration: int, tag: Tag
               ) -> tuple[Commit | None, list[str]]:
    """Commits what the job that saved it could not commit any more, if it is whole.

    Returns:
        The commit, or what is wrong; neither if files are missing, as when a job was killed.
    """
    if len(tag.writers) == len(writers):
        mine = [old for old, new in zip(tag.writers, writers, strict=True) if new == comm.rank]
    else:  # the files are shared out; where folders are not shared, some will be missing
        mine = tag.writers[comm.rank::comm.size]
    with on_all_ranks(comm, 'loading'):
        found = [_inspect(names.path(iteration, rank), rank) for rank in mine]
    everyone = sorted(_Said(*one) for said in comm.allgather_obj([tuple(one) for one in found])
                      for one in said)
    problems = [f'{one.problem}' for one in everyone if one.problem is not None]
    if problems or any(one.missing for one in everyone):
        return None, problems
    if others := [one.rank for one in everyone if one.save != tag.save]:
        return None, [f'the files of ranks {others} are of another save than that of rank 0']
    commit = Commit(tag.iteration, tag.size, [one.file for one in everyone if one.file])
    if comm.rank == 0:
        with contextlib.suppress(OSError):  # such as a folder that is only for reading
            commit.write(names.path(iteration, None))
    comm.barrier()
    return commit, []


def _inspect(path: str, rank: int) -> _Said:
    if not os.path.exists(path):
        return _Said(rank, missing=True)
    problem = problem_of(path)
    try:
        tag = None if problem else tag_of(path)
        size, sha256 = digest(path)
    except Exception as error:
        problem = f'{type(error).__name__}: {error}'
    if tag is None:
        problem = problem or 'is of an older version'
    elif tag.rank != rank:
        problem = problem or f'is that of rank {tag.rank}'
    if problem is not None:
        return _Said(rank, problem=f'rank {rank}: {path}: {problem}')
    assert tag is not None
    return _Said(rank, save=tag.save, file=File.of(path, Written(size, sha256, tag)))


def _verified(comm: Any, names: Names, writers: Sequence[int], commit: Commit
              ) -> tuple[Choice | None, list[str]]:
    """Reads the files of a commit through, those that will be loaded.

    Returns:
        What to load, or what is wrong.
    """
    if len(commit.files) == len(writers):
        path = problem = None
        if comm.rank in writers:
            file = commit.files[writers.index(comm.rank)]
            path = os.path.join(os.path.abspath(names.folder), file.name)
            problem = file.problem(names.folder)
        problems = [f'rank {rank}: {text}' for rank, text in enumerate(comm.allgather_obj(problem))
                    if text is not None]
        return (None if problems else Choice(commit.iteration, path, commit.size, False)), problems
    if not commit.are_replicas:
        raise ValueError(_refusal(names, writers, commit))
    path, problems = None, []
    if comm.rank == 0:
        for file in commit.files:  # any will do
            if problem := file.problem(names.folder):
                problems.append(f'rank 0: {problem}')
            else:
                path = os.path.join(os.path.abspath(names.folder), file.name)
                break
    found, problems = comm.bcast_obj((path is not None, problems))
    if not found:
        return None, problems
    return Choice(commit.iteration, path, commit.size, True,
                  len({file.buffers for file in commit.files}) == 1), []


def _refusal(names: Names, writers: Sequence[int], commit: Commit) -> str:
    alike: dict[str, list[int]] = {}
    for file in commit.files:
        alike.setdefault(file.state, []).append(file.rank)
    rows = '\n  '.join(f'ranks {ranks} hold the same' for ranks in alike.values())
    return (f'iteration {commit.iteration} in {names.folder} was not loaded: {len(commit.files)} '
            f'files were saved by {commit.size} ranks, {len(writers)} are to be loaded now, and '
            f'the models or optimizers in them are different:\n  {rows}\n'
            f'Start as many ranks as then ({commit.size}).')


def _of_older_version(comm: Any, names: Names, writers: Sequence[int], others: set[int]
                      ) -> tuple[Choice | None, bool]:
    """Finds the newest iteration of which all writers have a file that is whole by itself.

    Returns:
        It, and whether one was passed over.
    """
    said = False
    files: dict[int, str] | None = None
    has_more: set[int] = set()
    with on_all_ranks(comm, 'loading'):
        if comm.rank in writers:
            files = {iteration: path for iteration, path in names.find(comm.rank).items()
                     if iteration not in others}
            has_more = set(names.find(comm.size))
    everybody = [set(found) for found in comm.allgather_obj(None if files is None else list(files))
                 if found is not None]
    for iteration in sorted(set.intersection(*everybody), reverse=True):
        problem = None
        if files is not None:
            path = files[iteration]
            problem = problem_of(path)
            try:
                if problem is None and tag_of(path) is not None:
                    problem = 'is not of the same save as that of rank 0'
            except Exception as error:
                problem = str(error) or type(error).__name__
            if iteration in has_more:
                problem = f'there is a file of rank {comm.size}, too: start as many ranks as then'
        problems = [f'rank {rank}: {names.path(iteration, rank)}: {text}'
                    for rank, text in enumerate(comm.allgather_obj(problem)) if text is not None]
        if not problems:
            mine = None if files is None else files[iteration]
            return Choice(iteration, mine, None, False), said
        _warn(comm, iteration, problems)
        said = True
    return None, said


def _warn(comm: Any, iteration: int, problems: list[str]) -> None:
    if problems and comm.rank == 0:
        warnings.warn(f'the save of iteration {iteration} is passed over:\n  '
                      + '\n  '.join(problems), RuntimeWarning, stacklevel=4)
