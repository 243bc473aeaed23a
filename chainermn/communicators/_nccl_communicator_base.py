"""What the communicators on NCCL share: what they need, and models on one device."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import chainer

from chainermn import nccl
from chainermn._transport import array_buffers, packing
from chainermn._transport.nccl.connection import NcclGroup, together
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase


class NcclCommunicatorBase(MpiCommunicatorBase):
    """A communicator for models on a GPU, one GPU per rank.

    A subclass sets ``_nccl``, through which the arrays of a model go.
    """

    _name: ClassVar[str]
    _nccl: NcclGroup

    def __init__(self, mpi_comm: Any) -> None:
        together(mpi_comm, type(self).__name__, self.check_requirements)
        super().__init__(mpi_comm)

    @classmethod
    def check_requirements(cls) -> None:
        if missing := _missing():
            raise RuntimeError(
                f'NCCL is not available: {missing}.\nThe communicator {cls._name} exchanges '
                'gradients between GPUs.  Without GPUs use create_communicator(\'flat\').  With '
                'them, pip install "cupy-cuda13x[ctk]" nvidia-nccl-cu13, or "cupy-cuda12x[ctk]" '
                'nvidia-nccl-cu12, whichever the driver supports.')

    def finalize(self) -> None:
        super().finalize()
        self._nccl.destroy()

    def _groups(self, arrays: Sequence[Any]) -> list[list[Any]]:
        return packing.by_dtype(arrays)

    def _described(self, verb: str, arrays: dict[str, Any]) -> dict[str, str]:
        for path, array in arrays.items():
            if not array_buffers.on_device(array):
                raise TypeError(
                    f'parameter {path}: {self._name} takes models on a GPU but this is a '
                    f'{type(array).__module__}.{type(array).__name__}; call model.to_device('
                    "'@cupy:0') first, with the number of this rank's GPU, or use "
                    "create_communicator('flat')")
        import cupy

        current = cupy.cuda.Device().id
        elsewhere = {path: array.data.device_id for path, array in arrays.items()
                     if array.data.device_id != current}
        if elsewhere:
            path, device_id = elsewhere.popitem()
            raise ValueError(
                f'parameter {path} is on GPU {device_id} but GPU {current} is the current one; '
                f'call chainer.backends.cuda.get_device_from_id({device_id}).use() first')
        if self._nccl.device_id not in (None, current):
            raise ValueError(f'NCCL was connected for GPU {self._nccl.device_id}, where the first '
                             f'model was, but this model is on GPU {current}; make another '
                             'communicator for it')
        return super()._described(verb, arrays)


def _missing() -> str:
    """Says what is missing, or returns ''."""
    if not chainer.backends.cuda.available:
        return f'CuPy cannot be used ({chainer.backends.cuda._resolution_error})'
    import cupy

    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f'there is no GPU for CuPy ({error})'
    if not nccl._available:
        return f'CuPy cannot use the NCCL library ({nccl._reason})'
    if nccl.get_version() < 2000:
        return f'NCCL is of version {nccl.get_version()}, but 2.0 or newer is needed'
    return ''
