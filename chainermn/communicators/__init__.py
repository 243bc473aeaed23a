"""Communicators for groups of processes that exchange arrays, objects and gradients."""
from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypedDict, cast

import chainer

from chainer_compat.updates.fused_option import fused_updates
from chainermn._collectives import rank_info
from chainermn._collectives.rank_info import Arguments
from chainermn._consistency import mismatch
from chainermn._diagnostics import lifecycle, mpi_start, timeouts, unusable, watchdog
from chainermn._diagnostics.flight_recorder import CreationRecord
from chainermn._operations import common_error
from chainermn._operations.call import entered
from chainermn._operations.exceptions import CollectiveMismatchError
from chainermn._operations.ranks import ranks_text
from chainermn._process import cpu, environment, lazy_names, runtime, streams
from chainermn._process.mpi import MPI
from chainermn._types import Object
from chainermn.communicators import (  # noqa: F401  (they need no GPU)
    flat_communicator,
    naive_communicator,
)
from chainermn.communicators._recognize import as_communicator
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase

if TYPE_CHECKING:
    from numpy.typing import DTypeLike
    from typing_extensions import Unpack

__all__ = ['CollectiveMismatchError', 'CommunicatorBase', 'CommunicatorName', 'as_communicator',
           'create_communicator']

#: The names of communicators; the last three are from older versions.
CommunicatorName = Literal[
    'auto', 'naive', 'flat', 'pure_nccl', 'non_cuda_aware', 'dummy',
    'hierarchical', 'two_dimensional', 'single_node']

_CLASSES: dict[CommunicatorName, tuple[str, str]] = {
    'naive': ('naive_communicator', 'NaiveCommunicator'),
    'flat': ('flat_communicator', 'FlatCommunicator'),
    'pure_nccl': ('pure_nccl_communicator', 'PureNcclCommunicator'),
    'non_cuda_aware': ('non_cuda_aware_communicator', 'NonCudaAwareCommunicator'),
    'dummy': ('dummy_communicator', 'DummyCommunicator'),
}

#: Communicators of older versions, with their current names.
_RENAMED = {
    'hierarchical': 'pure_nccl',
    'two_dimensional': 'pure_nccl',
    'single_node': 'pure_nccl',
}


class _Options(TypedDict, total=False):
    """The keyword arguments of :func:`create_communicator`."""

    allreduce_grad_dtype: DTypeLike
    batched_copy: bool
    timeout: float | None


def __getattr__(name: str) -> object:
    """Import the module of a communicator on first access; ChainerMN 7 imports all of them."""
    return lazy_names.attribute(__name__, name, {
        module: f'{__name__}.{module}' for module, _ in _CLASSES.values()})


def create_communicator(communicator_name: CommunicatorName = 'pure_nccl',
                        mpi_comm: MPI.Intracomm | None = None,
                        **kwargs: Unpack[_Options]) -> CommunicatorBase:
    """Create a communicator. Collective: every rank of ``mpi_comm`` calls it.

    ==================  ======  ======  ============  ==============================================
    Name                CPU     GPU     NCCL          Recommended use
    ==================  ======  ======  ============  ==============================================
    ``auto``            yes     yes     if available  ``pure_nccl`` if all ranks can, else ``flat``
    ``pure_nccl``               yes     required      training on GPUs
    ``flat``            yes     yes                   training on CPUs, or on GPUs without NCCL
    ``naive``           yes     yes                   tests; averages gradients with MPI only
    ``non_cuda_aware``          yes     required      GPUs, with NCCL only within each node
    ``dummy``           yes     yes                   benchmarks; does not average gradients
    ==================  ======  ======  ============  ==============================================

    Args:
        communicator_name: Name of the communicator; the same on all ranks.
        mpi_comm: MPI communicator of the ranks; ``mpi4py.MPI.COMM_WORLD`` by default.

    Keyword Args:
        allreduce_grad_dtype (numpy.dtype or str): Dtype in which ``pure_nccl`` averages gradients
            (float16, float32 or float64); ``chainer.config.dtype`` by default. Ignored by ``auto``
            if it uses ``flat``. The same on all ranks, like the other options.
        batched_copy (bool): Whether a GPU copies all gradients to and from the buffer with one
            kernel launch; true by default.
        timeout (float or None): Seconds until an operation times out. The job is then aborted with
            a report that shows what each rank is doing. 0 disables the timeout. The default is the
            value of the environment variable ``CHAINERMN_TIMEOUT``, or 3600 if it is not set.

    Returns:
        The communicator of this rank; see :class:`chainermn.CommunicatorBase`.

    Raises:
        CollectiveMismatchError: If the arguments are not the same on all ranks.
        ValueError: If the name is unknown, or the communicator does not support an argument.
        TypeError: If ``mpi_comm`` is not an ``mpi4py.MPI.Intracomm``, or an argument is unknown.
        RuntimeError: If the communicator needs CuPy or NCCL, but one of them is not available.
        ImportError: If mpi4py or its MPI library is missing.

    Example:
        >>> comm = chainermn.create_communicator('flat', timeout=600)
        >>> comm.rank, comm.size
        (0, 2)
    """
    try:
        with mpi_start.watched():
            import mpi4py.MPI  # noqa: F401
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            f'{error}\nchainermn needs mpi4py and an MPI library. Install them with '
            '"pip install mpi4py mpich", or use the MPI library of your cluster.') from error
    unusable.check('create_communicator')
    watchdog.get().start()
    failure = None
    if mpi_comm is None:
        mpi_comm = MPI.COMM_WORLD
    elif not isinstance(mpi_comm, MPI.Intracomm):
        failure = mismatch.RemoteError.of('create_communicator', TypeError(
            f'mpi_comm must be an mpi4py.MPI.Intracomm, not {mpi_comm!r}'))
        mpi_comm = MPI.COMM_WORLD  # most likely the communicator that the other ranks pass
    with lifecycle.creation():
        return _create(CreationRecord(mpi_comm), communicator_name, mpi_comm, kwargs, failure)


class _Environment(runtime.ProcessState):
    def __init__(self) -> None:
        self.is_checked = False


def _warn_of_variables() -> None:
    """Print a warning, only once, if environment variables of ChainerMN have no effect."""
    if runtime.get(_Environment).is_checked:
        return
    runtime.get(_Environment).is_checked = True
    for name, nearest in environment.unknown().items():
        streams.write(f'chainermn: warning: the environment variable {name} is unknown and has no '
                      f'effect{f"; did you mean {nearest}?" if nearest else ""}\n')
    if environment.text(environment.RECORD_DETAILS) and not environment.text(environment.RECORD):
        streams.write(f'chainermn: warning: {environment.RECORD_DETAILS} has no effect without '
                      f'{environment.RECORD}\n')


@entered('create_communicator')
def _create(creation: CreationRecord, name: CommunicatorName, mpi_comm: MPI.Intracomm,
            options: _Options, failure: mismatch.RemoteError | None) -> CommunicatorBase:
    """Create a communicator, or raise the same error on all ranks.

    Args:
        creation: Flight record of this operation.
        name: Name of the communicator.
        mpi_comm: MPI communicator of the ranks.
        options: Options of :func:`create_communicator`.
        failure: Error of this rank, if any.
    """
    communicator_class, config = None, cast('dict[str, object]', options)
    no_nccl_reason = ''
    try:
        if isinstance(name, MPI.Comm):
            raise TypeError('communicator_name must be a str, not an mpi4py communicator; write '
                            "create_communicator('flat', mpi_comm=comm)")
        environment.check_flags()
        timeouts.check_environment()
        environment.debug_interval()  # raises an error if its value is invalid
        fused_updates()  # likewise
        if name == 'auto':
            no_nccl_reason = _why_no_nccl()
        communicator_class = _class_of('pure_nccl') if name == 'auto' else _find_class(name)
        config = _checked_config(communicator_class, config)
    except Exception as error:
        failure = failure or mismatch.RemoteError.of('create_communicator', error)
    call = f'create_communicator({name!r}' + ''.join(
        f', {item}={value!r}' for item, value in sorted(config.items())) + ')'
    ranks = rank_info.gather(
        mpi_comm, Arguments(call, failure, no_nccl_reason, _has_torch(), _rounding()))
    arguments = [each.arguments for each in ranks if each.arguments is not None]
    calls, failures = [each.call for each in arguments], [each.failure for each in arguments]
    common = None
    if any(failures):
        common = mismatch.remote_error(calls, failures)
    elif len(set(calls)) > 1:
        common = mismatch.calls_differ_error(calls)
    if common is not None:
        common_error.mark_failure(common, mpi_comm.rank, failures)
        raise common
    if name == 'auto':
        communicator_class = _select(mpi_comm.rank, [each.no_nccl_reason for each in arguments])
        if communicator_class is not _class_of('pure_nccl'):
            config.pop('allreduce_grad_dtype', None)
    assert communicator_class is not None
    if len({(each.has_torch, each.rounding) for each in arguments}) > 1:
        # PyTorch would round updates differently on some ranks, so the replicas would diverge.
        chainer.global_config.fused_updates = False
    elif mpi_comm.size > 1 and getattr(chainer.config, 'fused_updates', False):
        # Replace 'auto', because PyTorch may be imported on some ranks only.
        chainer.global_config.fused_updates = True
    with rank_info.gathered(mpi_comm, ranks):
        communicator = communicator_class(mpi_comm=mpi_comm)
    for item, value in config.items():
        communicator.set_config(item, value)
    if MPI.COMM_WORLD.rank == 0:
        _warn_of_variables()
    if mpi_comm.rank == 0:  # at the end, because a filter may turn the warning into an error
        _warn_of_different_kernels([each.has_torch for each in arguments])
    return communicator


def _has_torch() -> bool:
    """Return whether Chainer uses PyTorch's kernels on this rank, without importing PyTorch."""
    if getattr(chainer.config, 'use_torch', 'never') == 'never':
        return False
    # A module that is already imported may not have the __spec__ that find_spec looks for.
    return (sys.modules.get('torch') is not None
            or importlib.util.find_spec('torch') is not None)


def _rounding() -> str:
    """Return how PyTorch would round updates on this rank; ``''`` if Chainer computes updates."""
    is_fused = getattr(chainer.config, 'fused_updates', False)
    return f'PyTorch {cpu.vector_instructions()}' if is_fused else ''


def _warn_of_different_kernels(has_torch: Sequence[bool]) -> None:
    """Warn if only some ranks use PyTorch's kernels; called on rank 0."""
    without = [rank for rank, has in enumerate(has_torch) if not has]
    if 0 < len(without) < len(has_torch):
        warnings.warn(
            f"all ranks except {ranks_text(without)} use PyTorch's kernels, so the results differ "
            'in rounding. Install PyTorch on all ranks, or set CHAINER_USE_TORCH=never on all of '
            'them.', RuntimeWarning, stacklevel=5)


def _find_class(name: str) -> type[MpiCommunicatorBase]:
    """Return the class of a communicator by its name, after checking its requirements."""
    if name in _RENAMED:
        warnings.warn(f'the communicator {name!r} is deprecated; use {_RENAMED[name]!r}',
                      DeprecationWarning, stacklevel=5)  # the caller of create_communicator
        name = _RENAMED[name]
    for known in _CLASSES:
        if name == known:
            found = _class_of(known)
            found._check_requirements()
            return found
    advice = '' if isinstance(name, str) else (
        '. Pass a name first and the MPI communicator by keyword: '
        "create_communicator('naive', mpi_comm=MPI.COMM_WORLD)")
    raise ValueError(f'Unrecognized communicator: "{name}"; use one of auto, '
                     f'{", ".join(_CLASSES)}{advice}')


def _class_of(name: CommunicatorName) -> type[MpiCommunicatorBase]:
    module, class_name = _CLASSES[name]
    return cast('type[MpiCommunicatorBase]', getattr(
        importlib.import_module(f'chainermn.communicators.{module}'), class_name))


def _why_no_nccl() -> str:
    """Return why ``pure_nccl`` cannot be used on this rank; ``''`` if it can."""
    try:
        _find_class('pure_nccl')
    except RuntimeError as error:
        return str(error).partition('\n')[0]
    return ''


def _select(rank: int, reasons: Sequence[str]) -> type[MpiCommunicatorBase]:
    """Return the class for ``'auto'``: ``pure_nccl`` unless some rank cannot use it."""
    without = [each for each, reason in enumerate(reasons) if reason]
    name = 'flat' if without else 'pure_nccl'
    if rank == 0:
        why = f' ({ranks_text(without)}: {reasons[without[0]]})' if without else ''
        logging.getLogger('chainermn').info("create_communicator('auto') uses %r%s", name, why)
    return _find_class(name)


def _checked_config(communicator_class: type[MpiCommunicatorBase], kwargs: dict[str, Object]
                    ) -> dict[str, object]:
    """Check the keyword arguments of :func:`create_communicator`; return configuration items."""
    config = {'batched_copy': True, **kwargs}
    grad_dtype = config.pop('allreduce_grad_dtype', None)
    if unknown := set(config) - {'batched_copy', 'timeout'}:
        raise TypeError(f'create_communicator got unexpected keyword arguments {sorted(unknown)}')
    if config.get('timeout') is not None:
        config['timeout'] = timeouts.parse(config['timeout'])
    if grad_dtype is not None:
        config['allreduce_grad_dtype'] = communicator_class._check_grad_dtype(grad_dtype)
    return config
