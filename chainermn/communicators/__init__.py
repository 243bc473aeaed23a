"""Communicators: a group of processes that exchange arrays, objects and gradients."""
from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any, Literal

from chainermn._consistency.mismatch import CollectiveMismatchError
from chainermn.communicators.communicator_base import CommunicatorBase

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ['CollectiveMismatchError', 'CommunicatorBase', 'CommunicatorName', 'create_communicator']

#: The names of communicators; the last three are those of older versions.
CommunicatorName = Literal[
    'naive', 'flat', 'pure_nccl', 'non_cuda_aware', 'dummy',
    'hierarchical', 'two_dimensional', 'single_node']

_CLASSES: dict[CommunicatorName, tuple[str, str]] = {
    'naive': ('naive_communicator', 'NaiveCommunicator'),
    'flat': ('flat_communicator', 'FlatCommunicator'),
    'pure_nccl': ('pure_nccl_communicator', 'PureNcclCommunicator'),
    'non_cuda_aware': ('non_cuda_aware_communicator', 'NonCudaAwareCommunicator'),
    'dummy': ('dummy_communicator', 'DummyCommunicator'),
}

#: Communicators of older versions, with today's name.
_RENAMED = {
    'hierarchical': 'pure_nccl',
    'two_dimensional': 'pure_nccl',
    'single_node': 'pure_nccl',
}


def __getattr__(name: str) -> Any:
    """A module with a communicator: with ChainerMN 7 they are there without an import."""
    if name in [module for module, _ in _CLASSES.values()]:
        return importlib.import_module(f'chainermn.communicators.{name}')
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}', name=name)


def create_communicator(communicator_name: CommunicatorName = 'pure_nccl',
                        mpi_comm: MPI.Intracomm | None = None, **kwargs: Any) -> CommunicatorBase:
    """Makes a communicator.  Collective: every rank of ``mpi_comm`` calls it.

    ==================  ======  ======  ============  ==============================================
    Name                CPU     GPU     NCCL          Recommended use
    ==================  ======  ======  ============  ==============================================
    ``pure_nccl``               yes     required      training on GPUs
    ``flat``            yes     yes                   training on CPUs, or on GPUs without NCCL
    ``naive``           yes     yes                   testing: one collective per parameter
    ``non_cuda_aware``          yes     required      GPUs, NCCL only within each node
    ``dummy``           yes     yes                   measuring: gradients are not exchanged
    ==================  ======  ======  ============  ==============================================

    Args:
        communicator_name: The name; the same on all ranks.
        mpi_comm: ``mpi4py.MPI.Intracomm``, by default ``mpi4py.MPI.COMM_WORLD``.
        allreduce_grad_dtype: Dtype in which ``pure_nccl`` exchanges gradients (float16, float32 or
            float64); by default that of ``chainer.config.dtype``.
        batched_copy (bool): Whether a GPU copies all gradients in and out of the buffer with one
            kernel launch; true by default.
        timeout (float): Seconds that an operation may take before the job is ended with a report of
            what each rank is doing; 0 for any time.  By default ``CHAINERMN_TIMEOUT`` in the
            environment, or else an hour.

    Returns:
        A communicator; see :class:`chainermn.CommunicatorBase`.

    Raises:
        CollectiveMismatchError: If the arguments are not the same on all ranks.
        ValueError: If the name is unknown, or the communicator does not take an argument.
        RuntimeError: If the communicator needs CuPy or NCCL and they are not there.
        ImportError: If mpi4py or its MPI library is missing.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            f'{error}\nchainermn needs mpi4py and an MPI library: install them with '
            '"pip install mpi4py mpich", or use the MPI of your cluster.') from error
    from chainermn._consistency import mismatch
    from chainermn._diagnostics import flight_recorder, shutdown, thread_state, unusable, watchdog

    unusable.check('create_communicator')
    thread_state.know([create_communicator])
    watchdog.get().start()
    refusal = None
    if mpi_comm is None:
        mpi_comm = MPI.COMM_WORLD
    elif not isinstance(mpi_comm, MPI.Intracomm):
        refusal = mismatch.Refusal.of('create_communicator', TypeError(
            f'mpi_comm has to be an mpi4py.MPI.Intracomm, not {mpi_comm!r}'))
        mpi_comm = MPI.COMM_WORLD  # the likeliest one that the other ranks pass
    flight_recorder.creations[flight_recorder.world_ranks(mpi_comm)] += 1
    # This starts a process, which takes a while: the imports below run beside it.
    shutdown.cover(mpi_comm)
    communicator_class, config = None, kwargs
    try:
        communicator_class = _find_class(communicator_name)
        config = _checked_config(communicator_class, kwargs)
    except Exception as error:
        refusal = refusal or mismatch.Refusal.of('create_communicator', error)
    call = f'create_communicator({communicator_name!r}' + ''.join(
        f', {name}={value!r}' for name, value in sorted(config.items())) + ')'
    said = mpi_comm.allgather((call, refusal))
    calls, refusals = [call for call, _ in said], [refusal for _, refusal in said]
    if any(refusals):
        raise mismatch.refused_error(calls, refusals)
    if len(set(calls)) > 1:
        raise mismatch.calls_differ_error('create_communicator', calls)
    assert communicator_class is not None
    communicator: CommunicatorBase = communicator_class(mpi_comm=mpi_comm)
    for name, value in config.items():
        communicator.set_config(name, value)
    return communicator


def _find_class(name: Any) -> Any:
    """Returns the class of a name, once what it needs is known to be there."""
    if name in _RENAMED:
        warnings.warn(f'the communicator {name!r} of older versions is {_RENAMED[name]!r} today; '
                      f'use that name', DeprecationWarning, stacklevel=3)
        name = _RENAMED[name]
    if name not in _CLASSES:
        raise ValueError(f'Unrecognized communicator: "{name}"; there are {", ".join(_CLASSES)}')
    module, class_name = _CLASSES[name]
    found = getattr(importlib.import_module(f'chainermn.communicators.{module}'), class_name)
    found.check_requirements()
    return found


def _checked_config(communicator_class: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration that the keyword arguments ask for."""
    from chainermn._diagnostics import watchdog

    config = {'batched_copy': True, **kwargs}
    grad_dtype = config.pop('allreduce_grad_dtype', None)
    if unknown := set(config) - {'batched_copy', 'timeout'}:
        raise TypeError(f'create_communicator got unexpected keyword arguments {sorted(unknown)}')
    if config.get('timeout') is not None:
        config['timeout'] = watchdog.limit_of(config['timeout'])
    if grad_dtype is not None:
        config['allreduce_grad_dtype'] = communicator_class.check_grad_dtype(grad_dtype)
    return config
