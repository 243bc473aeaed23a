"""Debug mode: what is looked at besides, at a price, to name where training goes wrong."""
from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import chainer
import numpy as np

from chainermn import _environment
from chainermn._ranks import ranks_text

_SHOWN = 5  # parameters


def is_on() -> bool:
    """Whether Chainer's debug mode is on, or ``CHAINERMN_DEBUG=1`` in the environment."""
    return chainer.is_debug() or _environment.flag(_environment.DEBUG)


def check_own(gradients: Mapping[str, Any]) -> None:
    """Raises ValueError if a gradient of this rank is not finite, before others get it.

    Args:
        gradients: By path.
    """
    for path, gradient in gradients.items():
        xp = chainer.backend.get_array_module(gradient)
        strange = ~xp.isfinite(gradient)
        if bool(strange.any()):
            where = tuple(int(i) for i in np.argwhere(chainer.cuda.to_cpu(strange))[0])
            raise ValueError(f'gradients diverged: the gradient of {path} is not finite: '
                             f'{gradient[where]} at {list(where)}, {int(strange.sum())} of '
                             f'{gradient.size} elements')


def digests(model: Any) -> dict[str, str]:
    """A checksum of each initialized parameter, by path."""
    return {path: hashlib.blake2b(chainer.cuda.to_cpu(param.array).tobytes(),
                                  digest_size=8).hexdigest()
            for path, param in sorted(model.namedparams()) if param.is_initialized}


def check_alike(everyone: Sequence[Mapping[str, str]]) -> None:
    """Raises ValueError if the parameters of the ranks differ; the same error on all ranks.

    Args:
        everyone: What :func:`digests` gave, by rank.
    """
    paths = sorted(set().union(*everyone))
    differing = [path for path in paths if len({each.get(path) for each in everyone}) > 1]
    if not differing:
        return
    lines = []
    for path in differing[:_SHOWN]:
        groups: dict[str | None, list[int]] = {}
        for rank, each in enumerate(everyone):
            groups.setdefault(each.get(path), []).append(rank)
        lines.append(f'  {path}: ' + '; '.join(
            f'{digest or "not initialized"} on {ranks_text(those)}'
            for digest, those in groups.items()))
    if len(differing) > _SHOWN:
        lines.append(f'  and {len(differing) - _SHOWN} more')
    raise ValueError('\n'.join([
        f'the replicas of the model have drifted apart: {len(differing)} of {len(paths)} '
        f'parameters differ between the ranks, the first is {differing[0]} (checksums)', *lines,
        'Look for what changes parameters on some ranks only, between two updates: a hook, an '
        'extension, a snapshot that was loaded on one rank, random numbers in a hook.']))
