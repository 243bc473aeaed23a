"""Selects the save to resume from: the newest one that is complete on all ranks."""
from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Sequence
from typing import NamedTuple

from chainermn._failures.on_all_ranks import on_all_ranks, raise_on_all_ranks
from chainermn._failures.ranks import group_ranks, ranks_text
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions._checkpointing import npz
from chainermn.extensions._checkpointing.manifest import Manifest, SaveNames
from chainermn.extensions._checkpointing.rank_file import (
    FileRecord,
    Tag,
    digest,
    has_shards,
    read_tag,
)


class Selection(NamedTuple):
    """The save to resume from, on this rank."""

    iteration: int
    path: str | None  # the file that this rank reads, if it reads one
    size: int | None  # number of ranks of the job that saved it; None if unknown
    is_for_all: bool  # whether rank 0 reads for all ranks
    are_buffers_equal: bool = True  # in all replicas, if rank 0 reads for all
    paths: tuple[str, ...] = ()  # of the files to join, on rank 0, if it reads for all


class _Found(NamedTuple):
    """A save that rank 0 found: a manifest, or a file without one."""

    iteration: int
    manifest: Manifest | None = None
    tag: Tag | None = None  # of the file, if there is no manifest
    problem: str | None = None

    @property
    def is_of_older_version(self) -> bool:
        return self.manifest is None and self.tag is None and self.problem is None


class _FoundFile(NamedTuple):
    """The file of a rank in a save without a manifest."""

    rank: int
    save: str = ''
    record: FileRecord | None = None  # None if the file is missing, or has a problem
    problem: str | None = None


def select(comm: CommunicatorBase, names: SaveNames, writers: Sequence[int]) -> Selection | None:
    """Find the newest save that is complete on all ranks.  Collective: every rank calls it.

    The files of a save must be as its manifest says.  If there is no manifest, because the job
    ended before it was written, and all files belong to the same save, the manifest is written now.
    Files of older versions, which say nothing about their save, are the last choice.

    Args:
        comm: ChainerMN communicator.
        names: Names of the files.
        writers: The ranks that write files now; rank 0 is the first.

    Returns:
        The save; ``None`` on all ranks if there is none.

    Raises:
        ValueError: On every rank, if the newest save is of another number of writers, whose models
            or optimizers differed.

    Warns:
        RuntimeWarning: On rank 0, for each save that was skipped.
    """
    saves: list[_Found] = []
    if comm.rank == 0:
        with raise_on_all_ranks(comm, 'loading'):
            saves = _find_saves(names)
    saves = comm.bcast_obj(saves)
    has_skipped = False
    for save in saves:
        if save.is_of_older_version:
            continue
        manifest, problems = save.manifest, [save.problem] if save.problem else []
        if save.tag is not None:
            manifest, problems = _add_manifest(comm, names, writers, save.iteration, save.tag)
        if manifest is not None:
            selection, problems = _verify(comm, names, writers, manifest)
            if selection is not None:
                return selection
        if problems:
            _warn_skipped(comm, save.iteration, problems)
            has_skipped = True
    selection, has_skipped_older = _select_older_version(comm, names, writers, {
        save.iteration for save in saves if not save.is_of_older_version})
    if selection is None and saves and comm.rank == 0 and not (has_skipped or has_skipped_older):
        warnings.warn(f'no save in {names.folder} is complete on all ranks; nothing was loaded',
                      RuntimeWarning, stacklevel=3)
    return selection


def _find_saves(names: SaveNames) -> list[_Found]:
    """Return the saves of which rank 0 has a manifest or a file, newest first."""
    manifests, files = names.find(None), names.find(0)
    saves = []
    for iteration in sorted({*manifests, *files}, reverse=True):
        path = manifests.get(iteration) or files[iteration]
        try:
            if iteration not in manifests:
                save = _Found(iteration, tag=read_tag(path))
            else:
                manifest = Manifest.read(path)
                first = manifest.files[0]
                save = _Found(iteration, manifest)
                if first.name != names.of(iteration).file(first.rank):
                    save = _Found(iteration, problem=(
                        f'rank 0: {path}: is the manifest of another save'))
        except Exception as error:
            save = _Found(iteration, problem=f'rank 0: {path}: {_text(error)}')
        saves.append(save)
    return saves


def _add_manifest(comm: CommunicatorBase, names: SaveNames, writers: Sequence[int], iteration: int,
                  tag: Tag) -> tuple[Manifest | None, list[str]]:
    """Write the manifest of a save, if it is complete.

    Returns:
        The manifest, or what is wrong; neither if files are missing, as after a job was killed.
    """
    if len(tag.writers) == len(writers):
        mine = [old for old, new in zip(tag.writers, writers, strict=True) if new == comm.rank]
    else:  # any rank may read a file; without a shared folder, some are missing
        mine = tag.writers[comm.rank::comm.size]
    with raise_on_all_ranks(comm, 'loading'):
        found = [_inspect(names.path(iteration, rank), rank) for rank in mine]
    files = sorted((file for found in comm.allgather_obj(found) for file in found),
                   key=lambda file: file.rank)
    if problems := [file.problem for file in files if file.problem is not None]:
        return None, problems
    records = [file.record for file in files if file.record is not None]
    if len(records) < len(files):
        return None, []
    if others := [file.rank for file in files if file.save != tag.save]:
        return None, [f'the files of {ranks_text(others)} are of another save than that of rank 0']
    manifest = Manifest(tag.iteration, tag.size, records)
    if comm.rank == 0:
        with contextlib.suppress(OSError):  # such as a read-only folder
            manifest.write(names.path(iteration, None))
    comm.barrier()
    return manifest, []


def _inspect(path: str, rank: int) -> _FoundFile:
    if not os.path.exists(path):
        return _FoundFile(rank)
    tag, problem = None, npz.find_problem(path)
    try:
        tag = None if problem else read_tag(path)
        size, sha256 = digest(path)
    except Exception as error:
        problem = f'{type(error).__name__}: {error}'
    if problem is None and tag is None:
        problem = 'was written by an older version'
    if problem is None and tag is not None and tag.rank != rank:
        problem = f'is the file of rank {tag.rank}'
    if problem is not None or tag is None:
        return _FoundFile(rank, problem=f'rank {rank}: {path}: {problem}')
    return _FoundFile(rank, tag.save, FileRecord.of(path, tag, size, sha256))


def _verify(comm: CommunicatorBase, names: SaveNames, writers: Sequence[int], manifest: Manifest
            ) -> tuple[Selection | None, list[str]]:
    """Compare the files that will be loaded with the manifest.

    Returns:
        The selection, or what is wrong.
    """
    if len(manifest.files) == len(writers):
        path = problem = None
        if comm.rank in writers:
            record = manifest.files[writers.index(comm.rank)]
            path = os.path.join(names.folder, record.name)
            problem = record.find_problem(names.folder)
        if problems := _by_rank(comm.allgather_obj(problem)):
            return None, problems
        return Selection(manifest.iteration, path, manifest.size, False), []
    if not manifest.are_replicas:
        raise on_all_ranks(comm, ValueError(_different_states(names, writers, manifest)))
    paths: list[str] = []
    problems = []
    is_found = False
    if comm.rank == 0:
        for record in manifest.files:
            if problem := record.find_problem(names.folder):
                problems.append(f'rank 0: {problem}')
                continue
            paths.append(os.path.join(names.folder, record.name))
            if not has_shards(paths[0]):  # any file will do
                break
        is_found = bool(paths) and (not has_shards(paths[0]) or not problems)
    is_found, problems = comm.bcast_obj((is_found, problems))
    if not is_found:
        return None, problems
    return Selection(manifest.iteration, paths[0] if paths else None, manifest.size, True,
                     len({record.buffers for record in manifest.files}) == 1, tuple(paths)), []


def _different_states(names: SaveNames, writers: Sequence[int], manifest: Manifest) -> str:
    groups = group_ranks((record.rank, record.state) for record in manifest.files)
    rows = '\n  '.join(
        f'{ranks_text(ranks)} {"has its own" if len(ranks) == 1 else "have the same"} state'
        for ranks in groups.values())
    return (f'iteration {manifest.iteration} in {names.folder} was not loaded: {manifest.size} '
            f'ranks saved {len(manifest.files)} files, {len(writers)} files are needed now, and '
            f'the saved states differ between ranks\n  {rows}\n'
            f'Start {manifest.size} ranks.')


def _select_older_version(comm: CommunicatorBase, names: SaveNames, writers: Sequence[int],
                          others: set[int]) -> tuple[Selection | None, bool]:
    """Find the newest iteration of which each writer has an undamaged file.

    Args:
        comm: ChainerMN communicator.
        names: Names of the files.
        writers: The ranks that write files now.
        others: Iterations of which rank 0 has a manifest or a tag.

    Returns:
        The selection, and whether an iteration was skipped with a warning.
    """
    files: dict[int, str] | None = None
    has_more: set[int] = set()
    with raise_on_all_ranks(comm, 'loading'):
        if comm.rank in writers:
            files = {iteration: path for iteration, path in names.find(comm.rank).items()
                     if iteration not in others}
            has_more = set(names.find(comm.size))
    found = comm.allgather_obj(None if files is None else set(files))
    common = set.intersection(*(iterations for iterations in found if iterations is not None))
    has_skipped = False
    for iteration in sorted(common, reverse=True):
        path = problem = None
        if files is not None:
            path = files[iteration]
            problem = f'there is a file of rank {comm.size}, too: start as many ranks as saved it' \
                if iteration in has_more else _find_problem_of_older_version(path)
        problems = _by_rank(comm.allgather_obj(problem and f'{path}: {problem}'))
        if not problems:
            return Selection(iteration, path, None, False), has_skipped
        _warn_skipped(comm, iteration, problems)
        has_skipped = True
    return None, has_skipped


def _find_problem_of_older_version(path: str) -> str | None:
    if problem := npz.find_problem(path):
        return problem
    try:
        return None if read_tag(path) is None else 'is not of the same save as that of rank 0'
    except Exception as error:
        return _text(error)


def _warn_skipped(comm: CommunicatorBase, iteration: int, problems: Sequence[str]) -> None:
    if comm.rank == 0:
        warnings.warn(f'skipped the save of iteration {iteration}\n  ' + '\n  '.join(problems),
                      RuntimeWarning, stacklevel=4)


def _by_rank(problems: Sequence[str | None]) -> list[str]:
    return [f'rank {rank}: {text}' for rank, text in enumerate(problems) if text is not None]


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
