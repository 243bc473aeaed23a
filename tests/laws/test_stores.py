"""Laws of stores: any calls match NumPy in float64 and Chainer's optimizers; resumed trainings.

The reference of the first law is one process that has the values of all workers and follows the
definition: a push sums the values, possibly after compression, and merges the sum; a pull reads.
"""

import contextlib
import copy

import chainer
import numpy as np
import pytest
from chainer import optimizer_hooks as hooks
from chainer import optimizers
from hypothesis import strategies as st
from laws.law import law, planted
from laws.programs import OPTIMIZERS as ALL_OPTIMIZERS
from laws.programs import Lamb
from laws.saves import assert_same, checkpointer_of, folder_of, killed

from chainermn import kvstore
from chainermn.kvstore import RowSparse, _optimizer_updater

TYPES = ['local', 'device', 'dist_sync', 'dist_sync', 'dist_sync', 'dist_device_sync', 'dist_async']


class Normalize:
    """A hook that needs all elements of an array."""

    name = 'Normalize'
    call_for_each_param = True
    timing = 'pre'

    def __call__(self, rule, param):
        param.grad /= param.dtype.type(1 + np.linalg.norm(param.grad.astype(np.float64)))


OPTIMIZERS = {
    'Lamb': lambda: Lamb(.1),
    'SGD': lambda: optimizers.SGD(.1),
    'MomentumSGD': lambda: optimizers.MomentumSGD(.1),
    'Adam': lambda: optimizers.Adam(.1),
    'RMSprop': lambda: optimizers.RMSprop(.1, eps=1e-3),
}
TOLERANCE = {'float16': .02, 'float32': 2e-4, 'float64': 1e-9, 'int32': 0, 'complex64': 1e-5}


class Key:
    def __init__(self, random, name):
        self.name = name
        self.dtype = random.choice(['float16', 'float32', 'float32', 'float64', 'int32',
                                    'complex64'])
        self.is_row_sparse = random.rand() < .4
        shapes = [(4, 3), (5,), (3, 1, 2)]
        if not self.is_row_sparse:
            shapes += [(), (0, 2), (7, 5)]
        self.shape = shapes[random.randint(len(shapes))]

    def random(self, random, shape=None):
        """Return float64 multiples of 1/64, which all dtypes and float16 sums represent."""
        x = random.randint(-96, 97, self.shape if shape is None else shape)
        return np.asarray(x if self.dtype == 'int32' else x / 64)

    def value(self, random):
        """Return a dense float64 value, and the value that a worker pushes for it."""
        if len(self.shape) == 0 or random.rand() > (.7 if self.is_row_sparse else .2):
            dense = self.random(random)
            x = dense.astype(self.dtype)
            if x.ndim > 1 and random.rand() < .3:
                x = np.repeat(np.asfortranarray(x), 2, axis=-1)[..., ::2]
            return dense, x
        ids = random.randint(0, max(self.shape[0], 1), random.randint(5) if self.shape[0] else 0)
        rows = self.random(random, (len(ids), *self.shape[1:]))
        dense = np.zeros(self.shape)
        for i, row in zip(ids, rows, strict=True):
            dense[i] += row
        return dense, RowSparse(ids, rows.astype(self.dtype), self.shape)


class Reference:
    """The store, in one process."""

    def __init__(self, type):
        self.is_local = type in ('local', 'device')
        self.keys = {}
        self.values = {}
        self.threshold = None
        self.residuals = {}
        self.updater = 'assign'
        self.models = {}

    def init(self, key, value):
        """Add a key."""
        self.keys[key.name], self.values[key.name] = key, value.astype(key.dtype)
        self._set_up(key.name)

    def set_optimizer(self, make, rescale):
        self.updater, self.make, self.rescale = 'optimizer', make, rescale
        self.models = {}
        for name in self.keys:
            self._set_up(name)

    def _set_up(self, name):
        key = self.keys[name]
        if self.updater == 'optimizer' and key.dtype.startswith('float'):
            wide = key.dtype if key.dtype == 'float16' else 'float64'
            model = chainer.Link()
            with model.init_scope():
                model.w = chainer.Parameter(self.values[name].astype(wide))
            self.models[name] = self.make(model)

    def push(self, of_workers):
        """Merge the values of workers: for each worker, lists of results of Key.value by key."""
        for name in next(iter(of_workers.values())):
            key = self.keys[name]
            total = sum(self._sent(worker, key, values[name])
                        for worker, values in of_workers.items())
            self._merge(key, total)

    def _sent(self, worker, key, values):
        rows_only = key.is_row_sparse and all(isinstance(x, RowSparse) for _, x in values)
        dense = [x for x, _ in values]
        if self.threshold is None or rows_only or not key.dtype.startswith('float') or (
                self.is_local and len(values) == 1):
            return sum(dense)
        if self.is_local:
            return sum(self._quantize((key.name, n), x) for n, x in enumerate(dense))
        return self._quantize((key.name, worker), sum(dense))

    def _quantize(self, which, x):
        x = x + self.residuals.get(which, 0)
        sent = self.threshold * (
            (x >= self.threshold).astype(float) - (x <= -self.threshold).astype(float))
        self.residuals[which] = x - sent
        return sent

    def _merge(self, key, total):
        if self.updater == 'assign':
            result = total
        elif self.updater == 'mix':
            result = self.values[key.name] // 2 + total if key.dtype == 'int32' else \
                self.values[key.name] / 2 + total
        else:
            optimizer = self.models[key.name]
            w = optimizer.target.w
            w.grad = np.asarray(total * self.rescale).astype(w.dtype)
            optimizer.update()
            result = w.array
        self.values[key.name] = np.asarray(result).astype(key.dtype)

    def states(self):
        return {name: (rule.t, copy.deepcopy(rule.state)) for name, optimizer in self.models.items()
                for rule in [optimizer.target.w.update_rule]}

    def load(self, states):
        for name, (t, state) in states.items():
            rule = self.models[name].target.w.update_rule
            rule.t, rule._state, rule._fp32_param = t, copy.deepcopy(state), None


def mix(key, pushed, stored):
    stored[...] = (stored // 2 if stored.dtype.kind == 'i' else stored / 2) + pushed
    pushed[...] = 99


def optimizer_factory(random):
    make = OPTIMIZERS[random.choice(sorted(OPTIMIZERS))]
    chosen = [hook() for hook in (
        lambda: hooks.WeightDecay(.1), lambda: hooks.GradientHardClipping(-1.2, 1.2),
        Normalize) if random.rand() < .25]
    has_copies = random.rand() < .7

    def factory(model):
        optimizer = make()
        if has_copies:
            optimizer.use_fp32_update()
        optimizer.setup(model)
        for hook in chosen:
            optimizer.add_hook(hook)
        return optimizer

    return factory, has_copies, make is OPTIMIZERS['SGD'] or make is OPTIMIZERS['MomentumSGD']


class Program:
    """Makes the same random calls on a store and on its reference."""

    def __init__(self, random, comm, kv, path):
        self.random, self.comm, self.kv, self.path = random, comm, kv, path
        self.reference = Reference(kv.type)
        self.n = comm.size if kv.type.startswith('dist') else 1
        self.me = comm.rank if kv.type.startswith('dist') else 0
        self.names = [3, '3', 'w', 10**12, 'b/c', np.int64(5)]
        self.random.shuffle(self.names)
        self.floats_only = random.rand() < .5
        self.is_float16_safe = True
        self.calls = []
        self.differences = []  # raised at the end, so that all ranks make the same calls

    def run(self):
        self.init()
        self.init()
        calls = [self.push, self.push, self.push, self.pull, self.row_sparse_pull, self.init,
                 self.set_updater, self.set_optimizer, self.compress, self.save_and_load]
        for _ in range(14):
            call = calls[self.random.randint(len(calls))]
            self.calls.append(call.__name__)
            try:
                call()
            except AssertionError as error:
                self.differences.append(f'{", ".join(self.calls)}: {error}')
            self.kv.barrier()
        self.pull()
        assert not self.differences, '\n'.join(self.differences)

    def some(self, keys):
        """Return some of the keys. A key may occur several times."""
        return [keys[i] for i in self.random.randint(0, len(keys), 1 + self.random.randint(4))]

    def init(self):
        if not self.names:
            return
        key = Key(self.random, self.names.pop())
        while self.floats_only and not key.dtype.startswith('float'):
            key = Key(self.random, key.name)
        value = key.random(self.random)
        x = np.array(value if self.me == 0 else value + 1, key.dtype)
        self.kv.init(key.name, RowSparse.from_dense(x) if key.is_row_sparse else x)
        x[...] = 77
        self.reference.init(key, value)

    def push(self):
        reference, random = self.reference, self.random
        usable = [key for key in reference.keys.values()
                  if reference.updater != 'optimizer' or (
                      key.name in reference.models
                      and (key.dtype != 'float16' or self.is_float16_safe))]
        if not usable:
            return
        pushed = self.some(usable)
        as_list = len(pushed) > 1 or random.rand() < .5
        of_workers = [[[key.value(random) for _ in range(random.choice([1, 1, 3]))]
                       for key in pushed] for _ in range(self.n)]
        merged = {n: {key.name: [pair for other, pairs in zip(pushed, worker, strict=True)
                                 if other is key for pair in pairs] for key in pushed}
                  for n, worker in enumerate(of_workers)}
        turn, as_lists = random.randint(self.n), random.rand() < .2
        if self.kv.type != 'dist_async' or turn == self.me:
            values = [[x for _, x in pairs] if len(pairs) > 1 or as_lists else pairs[0][1]
                      for pairs in of_workers[self.me]]
            names = [key.name for key in pushed]
            self.kv.push(names if as_list else names[0], values if as_list else values[0])
        for pairs in of_workers[self.me]:
            for _, x in pairs:
                (x.rows if isinstance(x, RowSparse) else x)[...] = 55
        reference.push({turn: merged[turn]} if self.kv.type == 'dist_async' else merged)

    def pull(self):
        dense = [key for key in self.reference.keys.values() if not key.is_row_sparse]
        if not dense:
            return
        keys = self.some(dense)
        if self.random.rand() < .5:
            found = self.kv.pull([key.name for key in keys])
        else:
            outs = [[np.full((*key.shape, 2), 7, key.dtype)[..., 1]
                     for _ in range(1 + self.random.randint(2))] for key in keys]
            self.kv.pull([key.name for key in keys], out=outs)
            keys, found = zip(*((key, x) for key, of_key in zip(keys, outs, strict=True)
                                for x in of_key), strict=True)
        self.check(keys, found)
        for n, x in enumerate(found):
            x[...] = n  # no other code may refer to it
        for n, x in enumerate(found):
            np.testing.assert_array_equal(x, np.full(x.shape, n))

    def row_sparse_pull(self):
        sparse = [key for key in self.reference.keys.values() if key.is_row_sparse]
        if not sparse:
            return
        keys = self.some(sparse)
        ids = [self.random.randint(0, key.shape[0], self.random.randint(5)) for key in keys]
        names = [key.name for key in keys]
        if self.random.rand() < .5:
            found = self.kv.row_sparse_pull(names, row_ids=ids)
        else:
            outs = [[RowSparse([], np.zeros((0, *key.shape[1:]), key.dtype), key.shape)
                     if self.random.rand() < .6 else np.full(key.shape, 3, key.dtype)
                     for _ in range(1 + self.random.randint(3))] for key in keys]
            self.kv.row_sparse_pull(names, out=outs, row_ids=[[one] for one in ids])
            keys, ids, found = zip(*((key, one, x) for key, one, of_key in zip(
                keys, ids, outs, strict=True) for x in of_key), strict=True)
        for key, one, x in zip(keys, ids, found, strict=True):
            chosen = np.isin(np.arange(key.shape[0]), one)
            expected = np.where(chosen.reshape(-1, *[1] * (len(key.shape) - 1)),
                                self.reference.values[key.name], 0)
            self.close(key, x.todense() if isinstance(x, RowSparse) else x, expected)
            if isinstance(x, RowSparse):
                assert x.row_ids.tolist() == sorted({*one.tolist()})
        for n, x in enumerate(found):
            (x.rows if isinstance(x, RowSparse) else x)[...] = n
            if isinstance(x, RowSparse):
                x.row_ids[...] = n
        for n, x in enumerate(found):
            rows = x.rows if isinstance(x, RowSparse) else x
            np.testing.assert_array_equal(rows, np.full(rows.shape, n))

    def check(self, keys, found):
        for key, x in zip(keys, found, strict=True):
            assert (x.dtype, x.shape) == (np.dtype(key.dtype), key.shape)
            self.close(key, x, self.reference.values[key.name])

    def close(self, key, x, expected):
        tolerance = TOLERANCE[key.dtype]
        np.testing.assert_allclose(x, expected, rtol=tolerance, atol=tolerance,
                                   err_msg=f'{key.name!r} {key.dtype} {self.kv.type}')

    def set_updater(self):
        self.kv.set_updater(mix)
        self.reference.updater = 'mix'

    def set_optimizer(self):
        factory, has_copies, is_simple = optimizer_factory(self.random)
        rescale = self.random.choice([1., 1 / 3])
        try:
            self.kv.set_optimizer(factory(chainer.links.Linear(1, 1)), rescale)
        except ValueError as error:  # on all ranks
            assert 'cannot update shards' in str(error)
            return
        self.is_float16_safe = has_copies or is_simple
        self.reference.set_optimizer(factory, rescale)

    def compress(self):
        if self.random.rand() < .5:
            threshold = self.random.choice([.5, 1.])
            self.kv.set_gradient_compression({'type': '2bit', 'threshold': threshold})
            self.reference.threshold = threshold
            self.reference.residuals.clear()

    def save_and_load(self):
        if self.reference.updater != 'optimizer':
            self.set_optimizer()
        if self.reference.updater != 'optimizer':
            return
        for _ in range(2):
            self.push()
            self.kv.barrier()
        self.kv.save_optimizer_states(self.path)
        states = self.reference.states()
        self.push()
        self.kv.barrier()
        self.kv.load_optimizer_states(self.path)
        self.reference.load(states)
        self.push()


def last_row_only(unique):
    def changed(self):
        ids = {int(i): n for n, i in enumerate(self.row_ids)}
        return RowSparse([*ids], self.rows[[*ids.values()]], self.shape)
    return changed


@law(st.integers(0, 10**6), planted(RowSparse, 'unique', last_row_only), examples=4)
def test_store(comm, program, tmp_path):
    """Any calls to a KVStore match one process that has the values of all workers."""
    random = np.random.RandomState(program)
    kind, bound = random.choice(TYPES), random.choice([1_000_000, 4])
    path = comm.bcast_obj(str(tmp_path / f'states {program}'))
    is_shared = kind.startswith('dist')
    with contextlib.closing(kvstore.create(
            kind, comm if is_shared else None, bigarray_bound=bound)) as store:
        Program(random, comm, store, path if is_shared else f'{path}{comm.rank}').run()


class StoredModel(chainer.Chain):
    """A model whose second layer has two paths, in float32 or float16."""

    def __init__(self, rank, dtype):
        super().__init__()
        random = np.random.RandomState(rank)
        with self.init_scope():
            self.lazy = chainer.links.Linear(None, 3, initialW=random.randn(3, 4).astype(dtype))
            self.tied = chainer.links.Linear(3, 3, initialW=random.randn(3, 3).astype(dtype))
            self.twin = self.tied
            self.scalar = chainer.Parameter(np.array(1, dtype))
            self.frozen = chainer.Parameter(np.ones(2, dtype))

    def forward(self, x):
        y = self.twin(chainer.functions.tanh(self.tied(self.lazy(x))))
        return chainer.functions.sum(y ** 2) * self.scalar + chainer.functions.sum(self.frozen ** 2)


class StoreTraining:
    """Trains a random model through a store, and resumes in new objects before some steps."""

    def __init__(self, program, comm, folder=None):
        self.program, self.comm, self.folder = program, comm, folder
        self.start()

    def start(self):
        program = self.program
        with chainer.using_config('dtype', np.dtype(program['dtype'])):
            self.model = StoredModel(self.comm.rank, program['dtype'])
        optimizer = ALL_OPTIMIZERS[program['optimizer']]()
        if program['dtype'] == 'e' and 'eps' in optimizer.hyperparam.get_dict():
            optimizer.hyperparam.eps = 1e-3
        if program['fp32']:
            optimizer.use_fp32_update()
        store = kvstore.create(program['type'], self.comm if 'dist' in program['type'] else None,
                               bigarray_bound=program['bound'])
        if program['compressed']:
            store.set_gradient_compression({'type': '2bit', 'threshold': .25})
        self.optimizer = kvstore.create_kvstore_optimizer(
            optimizer, store, program['on']).setup(self.model)
        if program['hook']:
            self.optimizer.add_hook(hooks.WeightDecay(.01))

    def run(self):
        for step in range(8):
            if self.folder and step in self.program['kills']:
                saver = checkpointer_of(self.comm, self.folder)
                saver.save({'model': self.model, 'optimizer': self.optimizer}, step)
                killed(saver)
                self.start()
                saver = checkpointer_of(self.comm, self.folder)
                saver.maybe_load({'model': self.model, 'optimizer': self.optimizer})
                killed(saver)
            self.model.frozen.update_rule.enabled = step in self.program['enabled']
            x = np.random.RandomState([step, self.comm.rank]).randn(2, 4)
            self.optimizer.update(self.model, x.astype(self.program['dtype']))
        return self.optimizer.t, {path: (param.update_rule.t, param.array.tobytes())
                                  for path, param in self.model.namedparams()}


@st.composite
def trainings(draw):
    def choose(*values):
        return draw(st.sampled_from(values))

    dtype = choose('f', 'f', 'd', 'e')
    return {
        'type': choose('dist_sync', 'dist_sync', 'dist_device_sync', 'local'),
        'on': choose(True, True, False), 'bound': choose(3, 9, 10**6), 'dtype': dtype,
        'fp32': dtype == 'e' and choose(True, False), 'compressed': choose(False, False, True),
        'hook': choose(False, True), 'optimizer': choose(*ALL_OPTIMIZERS),
        'enabled': draw(st.sets(st.integers(0, 7))),
        'kills': draw(st.sets(st.integers(0, 7), min_size=1, max_size=3))}


def without_states(restore):
    def changed(self, key, stored, state):
        restore(self, key, stored, state)
        self.forget(key, int(state['t']))
    return changed


@pytest.mark.filterwarnings('ignore:overflow', 'ignore:invalid value', 'ignore:divide by zero')
@law(trainings(), planted(_optimizer_updater.OptimizerUpdater, 'restore', without_states))
def test_resumed_stores(comm, program, tmp_path):
    """A resumed training through a KVStore is bitwise identical to an uninterrupted one."""
    t, expected = StoreTraining(program, comm).run()
    found_t, found = StoreTraining(program, comm, folder_of(comm, tmp_path)).run()
    assert found_t == t
    assert_same([*found.items()], [*expected.items()])
