"""Debug mode: slow checks that find the rank and the parameter where training goes wrong."""
from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Mapping

import chainer
import numpy as np

from chainermn._consistency import mismatch
from chainermn._types import Array, Model


def check_local_gradients(gradients: Mapping[str, Array]) -> None:
    """Raise ValueError if a gradient of this rank is not finite, before it is sent.

    Args:
        gradients: The gradients, by parameter path.
    """
    for path, gradient in gradients.items():
        xp = chainer.backend.get_array_module(gradient)
        invalid = ~xp.isfinite(gradient)
        if bool(invalid.any()):
            where = tuple(int(i) for i in np.argwhere(chainer.cuda.to_cpu(invalid))[0])
            raise ValueError('Parameters diverged before allreduce: the gradient of '
                             f'{path} is not finite ({int(invalid.sum())} of {gradient.size} '
                             f'elements; the first is {gradient[where]} at index {list(where)}). '
                             'Lower the learning rate, clip gradients or check the input.')


def check_means(model: Model) -> None:
    """Raise ValueError if a mean gradient is not finite."""
    for path, parameter in sorted(model.namedparams(), key=operator.itemgetter(0)):
        grad = None if parameter.array is None else parameter.grad
        if grad is not None and not bool(
                chainer.backend.get_array_module(grad).isfinite(grad).all()):
            raise ValueError(f'Parameters diverged after allreduce: the mean gradient of {path} '
                             'is not finite. Lower the learning rate or the loss scale, or clip '
                             'gradients.')


def check_replicas(model: Model, allgather: Callable[[dict[str, str]], list[dict[str, str]]]
                   ) -> None:
    """Raise ValueError on all ranks if their parameters differ. Collective: every rank calls it.

    Args:
        model: The model.
        allgather: Function that gathers an object from each rank.
    """
    everyone = allgather({path: hashlib.blake2b(chainer.cuda.to_cpu(param.array).tobytes(),
                                                digest_size=8).hexdigest()
                          for path, param in sorted(model.namedparams()) if param.is_initialized})
    differing = mismatch.differing(everyone)
    if not differing:
        return
    raise ValueError('\n'.join([
        f'check_replicas: {len(differing)} of {len(set().union(*everyone))} parameters differ '
        'between ranks. Their checksums:',
        *mismatch.difference_table(everyone, 'not initialized'),
        'Find the code that changed parameters on only some of the ranks since the last update, '
        'for example a hook, an extension, a snapshot loaded on one rank, or random numbers in a '
        'hook. To find the first update that differs, record the run (CHAINERMN_RECORD=folder) '
        'and run "chainermn compare folder".']))
