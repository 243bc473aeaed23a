"""A forward step that is repeated before its backward step, instead of keeping its graph."""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import chainer
import numpy as np

from chainer_compat.graph.forward_state import ForwardState
from chainermn._types import Array, Model, Object
from chainermn.links._pipeline import states
from chainermn.links._pipeline.fingerprints import Fingerprint


class Recomputation:
    """The state before a forward step, and fingerprints of its output.

    The state of CuPy's generator cannot be read.  On a device, each forward step gives it a seed
    from NumPy's generator.

    Args:
        link: The link whose state the forward step uses.
        previous: An earlier forward step of the same link.
    """

    def __init__(self, link: Model, previous: Recomputation | None = None) -> None:
        self._device = link.device
        self._seed: int | None = None
        if isinstance(self._device, chainer.backend.GpuDevice):
            import cupy

            self._seed = np.random.randint(2**31)
            with chainer.using_device(self._device):
                cupy.random.seed(self._seed)
        states.forget(link)
        self._state: ForwardState = ForwardState(
            [link], None if previous is None else previous._state)
        self._output: list[Fingerprint] = []

    def set_output(self, arrays: Sequence[Array]) -> None:
        """Remember the output of the forward step."""
        self._output = [*map(Fingerprint.of, arrays)]

    def differences(self, arrays: Sequence[Array]) -> list[Array | bool] | None:
        """Return for each array of an output whether it differs from that of the forward step.

        Returns:
            ``None`` if number, shape or dtype of the arrays differ.
        """
        found = [*map(Fingerprint.of, arrays)]
        if [(x.shape, x.dtype) for x in found] != [(x.shape, x.dtype) for x in self._output]:
            return None
        return [x.differs(y) for x, y in zip(self._output, found, strict=True)]

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        """Restore the state before the forward step; at the end, the present one."""
        now = self._state.again()
        self._state.restore(keep_new_parameters=True)
        try:
            with self._random_numbers_of_device():
                yield
        finally:
            now.restore(keep_new_parameters=True)

    @contextlib.contextmanager
    def _random_numbers_of_device(self) -> Iterator[None]:
        if self._seed is None:
            yield
            return
        import cupy

        with chainer.using_device(self._device):
            generator = cupy.random.get_random_state()
            again = _second_generator(self._device.device.id)
            again.seed(self._seed)
            cupy.random.set_random_state(again)
        try:
            yield
        finally:
            with chainer.using_device(self._device):
                cupy.random.set_random_state(generator)


@functools.cache
def _second_generator(device_id: int) -> Object:
    """Return a generator of the current device; a new one for each step would be slow."""
    import cupy

    return cupy.random.RandomState(0)
