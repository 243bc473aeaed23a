"""Laws of the multi-node optimizer: N ranks match one process, with any combination of options."""

import dataclasses

import numpy as np
import pytest
from chainer.optimizer_hooks import WeightDecay
from equal_values import assert_same
from laws.law import law, planted
from laws.one_process import ROUNDING, TOLERANCES, Reference, arrays
from laws.programs import HOOKS, STEPS, Hook, Net, programs
from laws.training import Training, check_against_one_process, compare, is_finite

import chainermn
from chainer_compat.updates import sharded_states, update_hooks
from chainermn import CollectiveMismatchError
from chainermn._gradients import tied_arrays
from chainermn._gradients.compressors import PowerSGD, TwoBit
from chainermn._gradients.parameters import ParameterList
from chainermn.kvstore import _kvstore_optimizer
from chainermn.optimizers import _accumulation, _optimizer_settings
from chainermn.optimizers._accumulation import Accumulation
from chainermn.optimizers._double_buffering import DoubleBuffering
from chainermn.optimizers._full_update import FullUpdate
from chainermn.optimizers._gradient_averaging import GradientAveraging
from chainermn.optimizers._join import Join
from chainermn.optimizers._multi_node_optimizer import MultiNodeOptimizer
from chainermn.optimizers._sharded_states.sharded_update import ShardedUpdate

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.filterwarnings('ignore:overflow', 'ignore:invalid value', 'ignore:divide by zero',
                               'ignore:Non finite')]


def keep_own_scalars(mean):
    def changed(self, shards):
        params = [param for param in self.actual_optimizer.target.params() if param.array.ndim == 0]
        own = [np.array(param.grad) for param in params]
        has_means = mean(self, shards)
        for param, grad in zip(params, own, strict=True):
            param.grad = grad
        return has_means
    return changed


@law(programs(mode='plain', compression='', shard=False, n_accumulations=1),
     planted(GradientAveraging, 'mean', keep_own_scalars))
def test_mean_gradients(comm, program):
    """N ranks compute the same as one process with the batches of all ranks."""
    check_against_one_process(comm, program)


@law(programs(n_accumulations=[2, 3]),
     planted(_accumulation, '_divided', lambda divided: lambda total, n, dtype: divided(
         total, n - (total.size == 6), dtype)))
def test_accumulation(comm, program):
    """``n_accumulations`` gives the same result as one update with all the batches."""
    check_against_one_process(comm, program)


@law(programs(mode='overlap'),
     planted(Accumulation, 'completed', lambda completed: lambda self, param, grad: grad))
def test_overlap(comm, program):
    """``overlap`` gives the same parameters as training without it."""
    check_against_one_process(comm, program)


@law(programs(mode='double buffering'),
     planted(DoubleBuffering, '_finish_in_flight',
             lambda finish: lambda self: finish(self) or True))
def test_double_buffering(comm, program):
    """``double_buffering`` matches one process that applies gradients one update late."""
    check_against_one_process(comm, program)


@law(programs(shard=True, hooks=('GradientClipping',)),
     planted(ShardedUpdate, '_total', lambda total: lambda self, values: values))
def test_sharded_states(comm, program):
    """``shard_states`` gives the same parameters as training without it."""
    check_against_one_process(comm, program)


def with_zeros(join):
    def changed(path, shape, parts):
        return {name: value * (path != '/first/W')
                for name, value in join(path, shape, parts).items()}
    return changed


@law(programs(shard=True, dtype=['f', 'd'], compression=['', 'fp16'], infinite=()),
     planted(sharded_states, 'join', with_zeros))
def test_gathered_states(comm, program):
    """``gather_states`` returns the states of training without sharding, between updates."""
    sharded = Training(program, comm)
    full = Training(dataclasses.replace(program, shard=False), comm)
    for step in range(STEPS):
        for training in (full, sharded):
            training.happen(step)
            training.update(step)
            training.wait()
        if not all(np.isfinite(array).all() for array in arrays(full.optimizer.target).values()):
            return
        found, expected = sharded.optimizer.gather_states(), full.optimizer.gather_states()
        for path, states in expected.items():
            assert found[path].keys() == states.keys(), path
            for name, array in states.items():
                tolerance = TOLERANCES[program.dtype] + ROUNDING.get(program.compression, 0)
                np.testing.assert_allclose(
                    found[path][name], array, tolerance,
                    tolerance * max(1., np.abs(array).max(initial=0)), err_msg=f'{path} {name}')


def fill_with_ones(of_model):
    def changed(cls, model, attribute, zero_fill=False):
        for param in model.params(include_uninit=False) if zero_fill else ():
            if param.grad is None:
                param.grad = np.ones_like(param.array)
        return of_model(cls, model, attribute, zero_fill)
    return changed


@law(programs(zero_fill=True), planted(ParameterList, 'of_model', fill_with_ones))
def test_missing_gradients(comm, program):
    """With ``zero_fill``, gradients that a rank does not have are zero."""
    check_against_one_process(comm, program)


@law(programs(scale=[4., 'dynamic']),
     planted(update_hooks, '_aware', lambda aware: {*aware, Hook.__call__}))
def test_loss_scale(comm, program):
    """Loss scaling gives the same parameters as training without it."""
    check_against_one_process(comm, program)


@law(programs(compression=['fp16', 'bf16'], targets=[1., 1., 1e5]),
     planted(GradientAveraging, 'mean', keep_own_scalars))
def test_half_precision(comm, program):
    """``compression='fp16'`` and ``'bf16'`` round gradients before and after averaging."""
    check_against_one_process(comm, program)


#: Mostly 'finite', so that many programs have infinite gradients (see ``programs``).
OFTEN_INFINITE = ['finite'] * 12 + [*HOOKS]


def check_beside_another(comm, program):
    """Compare with one process, while another optimizer has the same compressor object."""
    other = Training(program, comm)
    for number in range(1 + program.n_accumulations):
        other.update(number)
    other.wait()
    check_against_one_process(comm, program)


@law(programs(compression='2bit', hooks=OFTEN_INFINITE),
     planted(TwoBit, 'compress', lambda compress: lambda self, x, key=None: compress(
         TwoBit(self.threshold), x, key)))
def test_two_bit(comm, program):
    """2-bit compression adds the residual of each update to the next one."""
    check_beside_another(comm, program)


@law(programs(compression='powersgd', hooks=OFTEN_INFINITE),
     planted(PowerSGD, '_store', lambda store: lambda self, matrix, p, q, scale: store(
         self, matrix, p, q, None)))
def test_power_sgd(comm, program):
    """PowerSGD sends two low-rank factors and adds the residual to the next update."""
    check_beside_another(comm, program)


@law(programs(events=['resume', '', 'resume', 'exception', 'hyperparameter', 'scale']),
     planted(FullUpdate, 'serialize', lambda f: lambda self, optimizer, serializer, is_root: None))
def test_resume(comm, program):
    """A resumed optimizer continues like an uninterrupted one."""
    check_against_one_process(comm, program)


def call_hooks_twice(step):
    def changed(self, *args):
        self.actual_optimizer.call_hooks('pre')
        step(self, *args)
    return changed


@law(programs(hooks=[*HOOKS]), planted(MultiNodeOptimizer, '_step', call_hooks_twice))
def test_hooks(comm, program):
    """Hooks change the averaged gradients, as in one process."""
    check_against_one_process(comm, program)


@law(programs(tie=['parameter', 'view', 'same', 'overlapping']),
     planted(tied_arrays, 'sharing_memory', lambda f: lambda arrays: []))
def test_tied_parameters(comm, program):
    """Parameters that share memory are updated as in one process."""
    check_against_one_process(comm, program)


@law(programs(mode=['plain', 'overlap'], n_accumulations=[1, 1, 2], shard=False,
              compression=['', '2bit', 'fp16'], events=('',) * STEPS),
     planted(Join, 'scale', lambda f: lambda self, model: None))
def test_join(comm, program):
    """With ``join``, ranks without batches contribute zero gradients or do not count."""
    draw = np.random.RandomState(program.seed)
    counts = draw.randint(0, STEPS + 1, comm.size)
    is_divided_by_all = bool(program.compression) or program.seed % 2 == 0
    found, reference = Training(program, comm), Reference(program, comm.size)
    with chainermn.join(found.optimizer, divide_by_initial_world_size=is_divided_by_all):
        for number in range(counts[comm.rank]):
            found.update(number)
    for number in range(max(counts)):
        active = [rank for rank, count in enumerate(counts) if number < count]
        reference.update(number, active, number == max(counts) - 1, not is_divided_by_all)
    if max(counts) and is_finite(reference):
        compare(program, STEPS, arrays(found.optimizer.target), found.optimizer.t, reference)


class StoreTraining(Training):
    """Trains through a KVStore. Its state is not saved."""

    def start(self):
        optimizer = self.program.create().setup(Net(self.program, self.comm.rank))
        self.program.configure(optimizer)
        store = chainermn.kvstore.create('dist_sync', self.comm)
        return chainermn.kvstore.create_kvstore_optimizer(optimizer, store)


@law(programs(mode='plain', n_accumulations=1, shard=False, compression='', zero_fill=True,
              events=['', 'exception', 'rule hook', 'hyperparameter', 'replace', 'enable']),
     planted(_kvstore_optimizer, 'fill_missing_grad', lambda f: lambda param: None))
def test_kvstore(comm, program):
    """A multi-node optimizer that trains through a KVStore matches one process."""
    check_against_one_process(comm, program, StoreTraining)


def change_setting(optimizer, number):
    """Change a setting of the optimizer, a hook or a parameter. Return a function to restore it."""
    numbers = [(optimizer.hyperparam, name) for name in sorted(optimizer.hyperparam.get_dict())]
    rules = [param.update_rule for _, param in sorted(optimizer.target.namedparams())]
    hooks = [hook for each in (optimizer, *rules) for table in (
        '_pre_update_hooks', '_post_update_hooks') for hook in getattr(
            each._hookable, table).values() if type(hook).__module__.startswith('chainer.')]
    numbers += [(hook, name) for hook in hooks for name in sorted(vars(hook))]
    settings = [(target, name, value + 1) for target, name in numbers
                for value in [getattr(target, name)] if type(value) in (int, float)]
    settings += [(rules[number % len(rules)], 'enabled', not rules[number % len(rules)].enabled),
                 (optimizer, '_loss_scale', 2 * (optimizer._loss_scale or 1))]
    target, name, value = settings[number % len(settings)]
    old = getattr(target, name)
    setattr(target, name, value)
    return lambda: setattr(target, name, old)


@law(programs(n_accumulations=1, mode=['plain', 'overlap'], compression=['', 'fp16'],
              events=('',) * STEPS, dtype=['f', 'd']),
     planted(_optimizer_settings, '_ARGUMENTS', lambda names: names[2:]), examples=3)
def test_differing_settings(comm, program):
    """If a setting differs on one rank, all ranks raise the same error and can then continue."""
    training = Training(program, comm)
    training.optimizer.target.one.update_rule.add_hook(WeightDecay(.1))
    for number in range(2):
        training.update(number)
    odd = program.seed % comm.size
    restore = change_setting(training.optimizer, program.seed) if comm.rank == odd else None
    with pytest.raises(CollectiveMismatchError, match='differ') as raised:
        training.update(2)
    messages = comm.allgather_obj(str(raised.value))
    assert messages == messages[:1] * comm.size
    if restore is not None:
        restore()
    training.update(3)
    training.wait()
    found = comm.allgather_obj(arrays(training.optimizer.target))
    for other in found:
        assert_same(other, found[0])
