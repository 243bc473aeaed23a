"""create_communicator: names, arguments, and the same error on all ranks if they are invalid."""

import contextlib
import warnings

import chainer
import numpy as np
import pytest
from mpi4py import MPI

import chainermn
from chainermn import communicators
from chainermn._process import cpu
from chainermn.communicators import (
    _CLASSES,
    CommunicatorBase,
    create_communicator,
    dummy_communicator,
    flat_communicator,
    mpi_communicator_base,
    naive_communicator,
    pure_nccl_communicator,
)

WORLD = MPI.COMM_WORLD


def test_classes():
    for name, module in (('naive', naive_communicator), ('flat', flat_communicator),
                         ('dummy', dummy_communicator)):
        comm = create_communicator(name)
        assert type(comm) is getattr(module, f'{name.title()}Communicator')
        assert isinstance(comm, mpi_communicator_base.MpiCommunicatorBase)
        assert isinstance(comm, chainermn.CommunicatorBase)
        comm.finalize()


def test_auto_is_flat_unless_every_rank_has_nccl(caplog, monkeypatch, same_error):
    with caplog.at_level('INFO', 'chainermn'):
        comm = create_communicator('auto', allreduce_grad_dtype='float16')
    assert type(comm) is flat_communicator.FlatCommunicator
    comm.finalize()
    messages = [each.getMessage() for each in caplog.records if each.name == 'chainermn']
    assert len(messages) == (WORLD.rank == 0)
    for message in messages:
        assert message.startswith("create_communicator('auto') uses 'flat' (rank")
        assert ': NCCL is not available: ' in message
    # One rank that lacks it decides for all.
    reasons = ['' if rank else 'NCCL is not available: why' for rank in range(WORLD.size)]
    assert communicators._select(1, reasons) is flat_communicator.FlatCommunicator
    monkeypatch.setattr(pure_nccl_communicator.PureNcclCommunicator, '_check_requirements',
                        classmethod(lambda cls: None))
    assert communicators._select(1, [''] * WORLD.size) is (
        pure_nccl_communicator.PureNcclCommunicator)


def test_a_rank_without_torch_gives_one_warning(monkeypatch):
    """Warnings are errors here, so the other ranks print none."""
    monkeypatch.setattr(chainer.global_config, 'fused_updates', True)
    monkeypatch.setattr('importlib.util.find_spec', lambda name: object())
    is_without = WORLD.rank == WORLD.size - 1
    expected = contextlib.nullcontext()
    if WORLD.rank == 0 and WORLD.size > 1:
        expected = pytest.warns(RuntimeWarning, match=f'all ranks except rank {WORLD.size - 1} use')
    with chainer.using_config('use_torch', 'never' if is_without else 'auto'), expected as caught:
        create_communicator('naive').finalize()
    if caught:
        assert [warning.filename for warning in caught] == [__file__]
    with chainer.using_config('use_torch', 'never'):
        create_communicator('naive').finalize()


@pytest.mark.parametrize('different', ['', 'processors', 'options'])
def test_different_rounding_disables_updates_by_pytorch(different, monkeypatch):
    """Otherwise the replicas of a model would diverge."""
    is_other = WORLD.rank == WORLD.size - 1
    monkeypatch.setattr(chainer.global_config, 'fused_updates',
                        not (is_other and different == 'options'))
    monkeypatch.setenv('ATEN_CPU_CAPABILITY',
                       'default' if is_other and different == 'processors' else 'avx2')
    monkeypatch.setattr(cpu, 'vector_instructions', cpu.vector_instructions.__wrapped__)
    before = chainer.config.fused_updates
    create_communicator('naive').finalize()
    assert chainer.config.fused_updates == (before if WORLD.size == 1 else not different)


def test_an_invalid_option_of_updates_is_an_error_on_all_ranks(monkeypatch):
    if WORLD.rank == WORLD.size - 1:
        monkeypatch.setattr(chainer.global_config, 'fused_updates', 'off')
    with pytest.raises(ValueError, match=r"fused_updates is 'off'\. Use True, False or"):
        create_communicator('naive')


def test_several_ranks_do_not_wait_for_a_kernel_to_import_pytorch(monkeypatch):
    """Otherwise only the ranks that have called one would update by PyTorch."""
    monkeypatch.setattr(chainer.global_config, 'fused_updates', 'auto')
    create_communicator('naive').finalize()
    assert chainer.config.fused_updates == ('auto' if WORLD.size == 1 else True)


@pytest.mark.mpi(min_size=2)
def test_auto_needs_the_same_arguments_on_all_ranks(same_error):
    name = 'auto' if WORLD.rank else 'flat'
    assert "create_communicator('auto'" in str(same_error(lambda: create_communicator(name)))


def test_ranks(comm):
    assert (comm.rank, comm.size) == (WORLD.rank, WORLD.size)
    assert comm.mpi_comm == WORLD
    # The tests run on one machine.
    assert (comm.intra_rank, comm.intra_size) == (WORLD.rank, WORLD.size)
    assert (comm.inter_rank, comm.inter_size) == (0, 1)
    assert isinstance(comm, CommunicatorBase)


def test_on_another_mpi_communicator(name, check_usable):
    """The ranks in reverse order, and each rank alone."""
    mpi_comm = WORLD.Split(0, -WORLD.rank)
    comm = create_communicator(name, mpi_comm)
    assert comm.rank == WORLD.size - 1 - WORLD.rank
    assert comm.mpi_comm is mpi_comm
    check_usable(comm)
    comm.finalize()
    mpi_comm.Barrier()  # the user's own is still there
    mpi_comm.Free()
    comm = create_communicator(name, mpi_comm=MPI.COMM_SELF)
    assert (comm.rank, comm.size) == (0, 1)
    check_usable(comm)
    comm.finalize()


def test_by_class(comm, name, check_usable):
    """Communicators created from their class have batched_copy off."""
    other = type(comm)(WORLD)
    assert other.get_config('batched_copy') is False
    check_usable(other)
    other.finalize()


def rejects(call, same_error, kind, *texts, odd=None):
    error = same_error(call, failed=odd)
    assert isinstance(error, kind)
    for text in texts:
        assert text in str(error), str(error)


@pytest.mark.parametrize('bad, kwargs, kind, text', [
    ('no_such', {}, ValueError, 'Unrecognized communicator: "no_such"; use one of auto, naive,'),
    (None, {}, ValueError, 'Unrecognized communicator: "None"'),
    (5, {}, ValueError, 'Pass a name first and the MPI communicator by keyword: create_'),
    (['naive'], {}, TypeError, 'unhashable'),
    ('naive', {'batchedcopy': True}, TypeError, "unexpected keyword arguments ['batchedcopy']"),
    ('naive', {'allreduce_grad_dtype': np.float32}, ValueError, 'is not supported by'),
    ('flat', {'allreduce_grad_dtype': 'float16'}, ValueError, 'is not supported by'),
])
def test_invalid_arguments(same_error, bad, kwargs, kind, text):
    rejects(lambda: create_communicator(bad, **kwargs), same_error, kind, text)
    if WORLD.size > 1:
        for odd in range(WORLD.size):
            def call(odd=odd):
                if WORLD.rank == odd:
                    return create_communicator(bad, **kwargs)
                return create_communicator('naive')
            rejects(call, same_error, kind, text, "create_communicator('naive', batched_copy=True)",
                    odd=odd)


@pytest.mark.parametrize('length', [1, 300, 5000])
def test_arguments_of_any_length(same_error, length):
    """The arguments of one rank may be too long for a single message to the others."""
    def create():
        create_communicator('x' * length if WORLD.rank == WORLD.size - 1 else 'naive')

    error = same_error(create, failed=WORLD.size - 1)
    assert isinstance(error, ValueError) and 'x' * length in str(error)
    create_communicator('naive').finalize()


def test_arguments_that_differ(same_error):
    if WORLD.size > 1:
        for odd in range(WORLD.size):
            name = 'flat' if WORLD.rank == odd else 'naive'
            rejects(lambda name=name: create_communicator(name), same_error, ValueError,
                    'Collective mismatch in create_communicator: arguments differ between ranks',
                    f"rank {odd}: create_communicator('flat', batched_copy=True)")
            copy = WORLD.rank != odd
            rejects(lambda copy=copy: create_communicator('naive', batched_copy=copy),
                    same_error, ValueError, 'batched_copy=True', 'batched_copy=False')


def test_invalid_mpi_comm(comm):
    for bad in (comm, 'world', 0):
        with pytest.raises(TypeError, match=r'mpi_comm must be an mpi4py\.MPI\.Intracomm'):
            create_communicator('naive', bad)


def create(name, **kwargs):
    """Return a communicator, or the error about missing requirements."""
    try:
        return create_communicator(name, **kwargs)
    except RuntimeError as error:
        return error


@pytest.mark.parametrize('old', ['hierarchical', 'two_dimensional', 'single_node'])
def test_old_names_warn(old):
    with pytest.warns(DeprecationWarning, match=f"'{old}' .* use 'pure_nccl'") as caught:
        made = create(old)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        expected = create('pure_nccl')
    if isinstance(expected, RuntimeError):
        assert str(made) == str(expected)
        assert 'NCCL is not available' in str(made)
    assert type(made) is type(expected)


def test_invalid_mpi_comm_on_one_rank(same_error):
    """The other ranks pass the default."""
    mpi_comm = 3 if WORLD.rank == WORLD.size - 1 else None
    error = same_error(lambda: create_communicator('naive', mpi_comm))
    assert type(error) is TypeError
    assert 'mpi_comm must be an mpi4py.MPI.Intracomm, not 3' in str(error)


@pytest.mark.mpi(min_size=2)
def test_a_class_on_one_rank(same_error):
    """The other ranks call create_communicator."""
    def create():
        if WORLD.rank == 1:
            naive_communicator.NaiveCommunicator(WORLD)
        else:
            create_communicator('naive')

    error = same_error(create)
    assert type(error) is chainermn.communicators.CollectiveMismatchError
    text = str(error)
    assert 'rank 1: a communicator class' in text
    assert "create_communicator('naive', batched_copy=True)" in text


def test_a_class_that_creates_another_communicator_first():
    """Its constructor creates two other communicators before its own."""
    class Nested(naive_communicator.NaiveCommunicator):
        def __init__(self, mpi_comm):
            node = mpi_comm.Split(mpi_comm.rank)
            # It is freed by the constructor of the next one, and only there.
            naive_communicator.NaiveCommunicator(node)
            self.node = naive_communicator.NaiveCommunicator(node)
            super().__init__(mpi_comm)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(_CLASSES, 'naive', ('naive_communicator', 'Nested'))
        patch.setattr(naive_communicator, 'Nested', Nested, raising=False)
        create_communicator('naive')
        comm = create_communicator('naive')
    assert (comm.size, comm.node.size) == (WORLD.size, 1)
    comm.node.finalize()
    comm.finalize()
