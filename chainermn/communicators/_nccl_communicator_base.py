"""The base class of NCCL-based communicators; checks for CuPy, a GPU and the NCCL library."""
from __future__ import annotations

import chainer

from chainermn import nccl
from chainermn._process.mpi import MPI
from chainermn._transport.nccl.connection import together
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase


class NcclCommunicatorBase(MpiCommunicatorBase):
    """A communicator for models on GPUs, with one GPU per rank."""

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        together(mpi_comm, type(self).__name__, self._check_requirements)
        super().__init__(mpi_comm)

    @classmethod
    def _check_requirements(cls) -> None:
        if missing := _missing():
            raise RuntimeError(
                f'NCCL is not available: {missing}.\nThe communicator '
                f'{cls.transport_class.name} averages '  # type: ignore[attr-defined]
                "gradients between GPUs. Without GPUs, use create_communicator('flat'), or "
                "create_communicator('auto'), which uses NCCL only if all ranks can. With GPUs, "
                'pip install "cupy-cuda13x[ctk]" nvidia-nccl-cu13, or "cupy-cuda12x[ctk]" '
                'nvidia-nccl-cu12 if your driver does not support CUDA 13.')


def _missing() -> str:
    """Return why NCCL cannot be used; ``''`` if it can."""
    if not chainer.backends.cuda.available:
        return f'CuPy cannot be used ({chainer.backends.cuda._resolution_error})'
    import cupy

    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f'CuPy finds no GPU ({error})'
    if not nccl._available:
        return f'CuPy cannot use the NCCL library ({nccl._reason})'
    if nccl.get_version() < 2000:
        return f'NCCL {nccl.get_version()} is too old; install 2.0 or newer'
    return ''
