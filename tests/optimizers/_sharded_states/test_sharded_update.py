"""Sharded optimizer states: the same results as without them, and a share of the memory.

the laws of training compare optimizers, hooks, options and models with one process.
"""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import optimizers
from shared_fixtures import raises_on_all

import chainermn
from chainermn.communicators.flat_communicator import FlatCommunicator

N_IN, N_OUT, BATCH, STEPS = 6, 4, 5, 4


def mlp():
    return chainer.Sequential(L.Linear(N_IN, 50), F.tanh, L.Linear(50, 30), F.tanh,
                              L.Linear(30, N_OUT), L.Scale(W_shape=(N_OUT,)))


def batch(comm, step, dtype='float32'):
    random = np.random.RandomState(100 * step + comm.rank)
    return random.randn(BATCH, N_IN).astype(dtype), random.randint(N_OUT, size=BATCH)


def train(comm, shard, make=mlp, create=optimizers.Adam, configure=lambda optimizer: None,
          steps=STEPS, dtype='float32', change=lambda optimizer, step: None):
    """Trains a model; returns the optimizer, and the parameters after each step."""
    np.random.seed(0)
    model = make()
    optimizer = chainermn.create_multi_node_optimizer(
        create(), comm, shard_states=shard).setup(model)
    configure(optimizer)
    seen = []
    for step in range(steps + 1):
        change(optimizer, step)
        x, t = batch(comm, step, dtype)
        optimizer.update(lambda x, t: F.softmax_cross_entropy(model(x), t), x, t)
        seen.append(parameters(model))
    return optimizer, seen


def parameters(model):
    return {path: param.array.copy() for path, param in model.namedparams()}


def assert_same(comm, found, expected):
    """Check that parameters have the same bits; MPI sums in another order, so up to rounding."""
    is_exact = comm.size <= 2 or isinstance(comm, FlatCommunicator)
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for path, array in theirs.items():
            text = f'{path} after update {step}'
            if is_exact:
                np.testing.assert_array_equal(ours[path], array, text)
            else:
                tolerance = 1e-3 if array.dtype == np.float16 else 1e-5
                np.testing.assert_allclose(ours[path], array, tolerance, tolerance, text)


def check(comm, **arguments):
    _, expected = train(comm, False, **arguments)
    optimizer, found = train(comm, True, **arguments)
    assert_same(comm, found, expected)
    assert any((found[0][path] != found[-1][path]).any() for path in found[0])
    return optimizer


def state_bytes(optimizer):
    return sum(value.nbytes for param in optimizer.target.params()
               for value in (param.update_rule.state or {}).values()
               if isinstance(value, np.ndarray))


@pytest.mark.parametrize('configure', [
    lambda optimizer: None,
    lambda optimizer: optimizer.target[0].W.update_rule.add_hook(lambda *_: None)])
def test_gathered_states_are_those_of_an_optimizer_without_shards(comm, configure):
    full, _ = train(comm, False, configure=configure)
    sharded, _ = train(comm, True, configure=configure)
    expected, found = full.gather_states(), sharded.gather_states()
    assert found.keys() == expected.keys() == dict(full.target.namedparams()).keys()
    for path, states in expected.items():
        assert states.keys() == found[path].keys() == {'m', 'v'}
        for name, array in states.items():
            np.testing.assert_allclose(found[path][name], array, 1e-4, 1e-7)
    assert state_bytes(sharded) < state_bytes(full) or comm.size == 1


def wide():
    """A model of several chunks of the exchange: a rank that needs a shard gets only some."""
    return chainer.Sequential(L.Linear(N_IN, 100_000), F.tanh, L.Linear(100_000, N_OUT))


@pytest.mark.parametrize('timing', ['pre', pytest.param('post', marks=pytest.mark.full)])
def test_hooks_of_the_optimizer_see_all_parameters_and_gradients(comm, timing):
    seen = []

    def hook(optimizer):
        seen.append([float(abs(array).sum()) for param in optimizer.target.params()
                     for array in (param.array, param.grad)])

    check(comm, make=wide, create=optimizers.SGD, steps=2,
          configure=lambda optimizer: optimizer.add_hook(hook, 'hook', timing))
    assert len(seen) == 4 and seen[:2] == seen[2:]


@pytest.mark.parametrize('timing, late', [('pre', False), ('post', True)])
def test_hooks_of_parameters_see_the_complete_parameter(comm, timing, late):
    """Also one that is added later: the states of the parameter move to one rank."""
    def hook(rule, param):
        assert param.shape == (30, 50)
        param.array[...] *= 1 + float(param.array.sum()) / 1e4

    def change(optimizer, step):
        if step == (2 if late else 0):
            optimizer.target[2].W.update_rule.add_hook(hook, 'hook', timing)

    check(comm, change=change)


def test_a_rule_with_states_of_other_shapes(comm):
    """The states of a matrix are vectors; the update fails for a state of another shape."""
    class Rule(chainer.UpdateRule):
        def init_state(self, param):
            n_rows, n_columns = param.shape
            self.state.update(rows=np.zeros(n_rows, 'f'), columns=np.zeros(n_columns, 'f'))

        def update_core_cpu(self, param):
            self.state['rows'] += np.square(param.grad).sum(1)
            self.state['columns'] += np.square(param.grad).sum(0)
            scale = np.add.outer(self.state['rows'], self.state['columns'])
            param.array[...] -= .1 * param.grad / np.sqrt(scale + 1)

    class Factored(chainer.optimizer.GradientMethod):
        def create_update_rule(self):
            return Rule(self.hyperparam)

    def make():  # the rows of a matrix with one column are as many as its elements
        return chainer.Sequential(*(
            L.Linear(m, n, nobias=True) for m, n in ((N_IN, 1), (1, 9), (9, 8), (8, N_OUT))))

    def change(optimizer, step):
        optimizer.target[3].W.update_rule.enabled = step < 3  # others get the shards

    check(comm, make=make, create=Factored, change=change, steps=5)


def test_two_optimizers_of_the_same_parameters(comm):
    """Their shards differ, since one has more parameters."""
    trained = []
    for shard in False, True:
        np.random.seed(0)
        model = mlp()
        targets = [model, model[2]]  # the rules of model[2] are those of the second optimizer
        both = [chainermn.create_multi_node_optimizer(
            create(), comm, shard_states=shard).setup(target) for create, target in zip(
                (optimizers.Adam, optimizers.MomentumSGD), targets, strict=True)]
        for step in range(STEPS):
            x, t = batch(comm, step)
            for optimizer in both:
                optimizer.update(
                    lambda x, t, model=model: F.softmax_cross_entropy(model(x), t), x, t)
        trained.append(parameters(model))
    assert_same(comm, trained[1:], trained[:1])


def half():
    with chainer.using_config('dtype', np.dtype('float16')):
        return chainer.Sequential(L.Linear(N_IN, 400), L.Linear(400, N_OUT))


def use_fp32_update(optimizer):
    optimizer.use_fp32_update()


def test_each_rank_has_its_share_of_the_states(comm):
    (complete, _), (sharded, _) = (
        train(comm, shard, half, dtype='float16', configure=use_fp32_update)
        for shard in (False, True))
    share = state_bytes(sharded) / state_bytes(complete)
    assert share <= 1 / comm.size + .05
    assert comm.allreduce_obj(state_bytes(sharded)) == state_bytes(complete)
    params = [*sharded.target.params()]
    copies = sum(0 if param.update_rule._fp32_param is None else param.update_rule._fp32_param.size
                 for param in params)
    assert comm.allreduce_obj(copies) == sum(param.size for param in params)


# --- snapshots -----------------------------------------------------------------------------------

def copied(optimizer, into, tmp_path, comm, rank=None):
    """Save an optimizer on each rank, and load the file of a rank into another optimizer."""
    folder = comm.bcast_obj(str(tmp_path))
    chainer.serializers.save_npz(f'{folder}/{comm.rank}', optimizer)
    comm.barrier()
    chainer.serializers.load_npz(f'{folder}/{comm.rank if rank is None else rank}', into)
    comm.barrier()


@pytest.mark.mpi(min_size=2)
def test_a_file_of_one_rank_is_an_error_on_all_ranks(comm, tmp_path):
    optimizer, _ = train(comm, True)
    copied(optimizer, optimizer, tmp_path, comm, rank=0)
    for _ in range(2):  # also if the program continues
        with raises_on_all(ValueError, match=r'the state of /.* is incomplete'):
            optimizer.update(lambda: F.sum(F.square(optimizer.target[0].W)))


@pytest.mark.parametrize('shard', [False, True], ids=['complete', 'sharded'])
@pytest.mark.mpi(min_size=2)
def test_a_file_loaded_on_one_rank_is_an_error_on_all_ranks(comm, tmp_path, shard):
    saved, _ = train(comm, shard)
    loaded, _ = train(comm, True, steps=0)
    if comm.rank == 0:
        chainer.serializers.save_npz(str(tmp_path / 'file'), saved)
        chainer.serializers.load_npz(str(tmp_path / 'file'), loaded)
    loaded.target.append(L.Linear(N_OUT, N_OUT))  # so all ranks broadcast
    with raises_on_all(ValueError, match='t: 4 on rank 0; 0 on rank'):
        loaded.update(lambda: F.sum(F.square(loaded.target[0].W)))


@pytest.mark.mpi(min_size=2)
def test_a_shard_is_an_error_without_shard_states(comm, tmp_path):
    sharded, _ = train(comm, True)
    complete, _ = train(comm, False)
    with pytest.raises(ValueError, match='shard_states=True'):
        copied(sharded, complete, tmp_path, comm)
    comm.barrier()


# --- errors --------------------------------------------------------------------------------------

class OwnUpdate(optimizers.Adam):
    def update(self, lossfun=None, *args, **kwds):
        super().update(lossfun, *args, **kwds)


@pytest.mark.parametrize('kind', [chainer.Optimizer, OwnUpdate])
def test_optimizers_that_do_not_step_like_a_gradient_method(comm, kind):
    with raises_on_all(TypeError, match='does not override the method update'):
        chainermn.create_multi_node_optimizer(kind(), comm, shard_states=True)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize('begin', ['send', 'receive'])
def test_messages_of_the_program_during_an_update(comm, begin):
    """Parameters are also sent as messages, which must not be mixed up with the script's."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    pending = []

    def start(optimizer, step):
        if step != 2:
            return
        for tag in 0, 7:
            pending.append(comm.isend(np.full(3, comm.rank + tag), after, tag)
                           if begin == 'send' else comm.irecv(before, tag))

    _, expected = train(comm, True)
    _, found = train(comm, True, change=start)
    assert_same(comm, found, expected)
    received = []
    for tag, request in zip((0, 7), pending, strict=True):
        if begin == 'receive':
            comm.send(np.full(3, comm.rank + tag), after, tag)
            received.append(request.wait())
        else:
            received.append(comm.recv(before, tag))
            request.wait()
    np.testing.assert_array_equal(received, [[before] * 3, [before + 7] * 3])
