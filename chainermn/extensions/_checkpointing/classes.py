"""Compares the classes of saved objects, because a state must match the class that loads it.

The states of two optimizers may have the same names and shapes but different meanings.
"""
from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from chainermn._operations.on_all_ranks import on_all_ranks
from chainermn._operations.ranks import group_lines
from chainermn._types import Object
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions._checkpointing.parts import SavedParts
from chainermn.optimizers._delegate import unwrap

CLASSES = 'chainermn/classes'  # name of the array that contains the class names, as JSON

_MAX_NAMED = 3  # maximum number of parameters in an error message


def capture_classes(parts: SavedParts) -> dict[str, np.ndarray]:
    """Return the class names of models, optimizers, update rules and iterators.

    Returns:
        A dict with one array.
    """
    return {CLASSES: np.frombuffer(json.dumps(_find_names(parts)).encode(), np.uint8)}


def find_differences(arrays: Mapping[str, np.ndarray], parts: SavedParts) -> str:
    """Compare the classes in a file with the classes of the parts to load.

    Args:
        arrays: The saved arrays by name. Files of older versions contain no class names.
        parts: The parts to load.

    Returns:
        The differences; ``''`` if there are none.
    """
    saved: dict[str, str] = {}
    if CLASSES in arrays:
        saved = json.loads(arrays[CLASSES].tobytes())
    texts: list[str] = []
    rules: dict[tuple[str, str], list[str]] = {}
    for name, current in _find_names(parts).items():
        if saved.get(name, current) == current:
            continue
        if name.endswith('/') or not name:
            texts.append(f'{name.rstrip("/") or "the object"} changed from {saved[name]} to '
                         f'{current}')
        else:
            rules.setdefault((saved[name], current), []).append(name)
    if not texts:  # otherwise, the rules may differ only because the optimizers do
        for (before, now), names in rules.items():
            more = f' and {len(names) - _MAX_NAMED} more' * (len(names) > _MAX_NAMED)
            texts.append(f'the update rule of {", ".join(names[:_MAX_NAMED])}{more} changed from '
                         f'{before} to {now}')
    return '; '.join(texts)


def raise_differences(comm: CommunicatorBase, differences: str, problem: str, advice: str) -> None:
    """Raise an error if any rank differs from the checkpoint. Collective: every rank calls it.

    Args:
        comm: ChainerMN communicator.
        differences: Differences on this rank, such as the result of :func:`find_differences`;
            ``''`` if there are none.
        problem: First line of the error.
        advice: Last line of the error, with the remedy.

    Raises:
        ValueError: On every rank, if any rank differs.
    """
    by_rank = comm.allgather_obj(differences)
    if any(by_rank):
        raise on_all_ranks(comm, ValueError('\n'.join([
            problem, *group_lines(enumerate(text or 'no difference' for text in by_rank)),
            advice])))


def _find_names(parts: SavedParts) -> dict[str, str]:
    """Return the class names of the parts by prefix, and of the update rules by parameter."""
    names = {}
    for prefix, part in parts.all.items():
        actual = unwrap(part)
        # Multi-node iterators hold no state on ranks other than the master.
        rank_master = getattr(part, 'rank_master', None)
        if rank_master is None or rank_master == part.communicator.rank:
            names[prefix] = type(actual).__name__
        model: Object = getattr(actual, 'target', None)
        if hasattr(model, 'namedparams'):
            names.update({prefix + path.lstrip('/'): type(param.update_rule).__name__
                          for path, param in sorted(model.namedparams())
                          if param.update_rule is not None})
    return names
