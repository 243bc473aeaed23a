"""One script for ChainerMN 7 and 8: each rank writes its observations as JSON.

``mpiexec -n N python program.py FOLDER SCENARIO ...``. A scenario is a function of a communicator
that returns plain data.
"""
import contextlib
import copy
import glob
import json
import os
import sys
import tempfile
import warnings

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import training
from chainer.training import extensions

import chainermn
import chainermn.functions
import chainermn.iterators
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase

SAME = {}
FIXED = {}


def same(function):
    """Register a scenario whose results have to agree."""
    SAME[function.__name__] = function
    return function


def fixed(function):
    """Register a scenario whose result differs on purpose."""
    FIXED[function.__name__] = function
    return function


def digits_like(seed, n, shape):
    rng = np.random.RandomState(seed)
    x = rng.normal(0, 1, (n, *shape)).astype(np.float32)
    return x, (x.reshape(n, -1).sum(axis=1) > 0).astype(np.int32)


def shared_folder(comm):
    """A new folder, the same on all ranks."""
    folder = tempfile.mkdtemp(dir=sys.argv[1]) if comm.rank == 0 else None
    return comm.bcast_obj(folder)


class MLP(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.l1 = L.Linear(None, 8)
            self.l2 = L.Linear(8, 8)
            self.unused = L.Linear(3, 3)
            self.l3 = L.Linear(8, 2)

    def forward(self, x):
        return self.l3(F.relu(self.l2(F.relu(self.l1(x)))))


def loss_curve(comm, make_model, optimizer, shape, hooks=(), steps=6):
    np.random.seed(comm.rank)
    model = L.Classifier(make_model())
    optimizer = chainermn.create_multi_node_optimizer(optimizer, comm)
    optimizer.setup(model)
    for hook in hooks:
        optimizer.add_hook(hook)
    x, t = digits_like(comm.rank, 4 * steps, shape)
    losses = []
    for i in range(steps):
        batch = slice(4 * i, 4 * i + 4)
        optimizer.update(model, x[batch], t[batch])
        losses.append(float(model.loss.array))
    return {'losses': losses, 't': optimizer.t,
            'weights': [p.array.tolist() for _, p in sorted(model.namedparams())]}


@same
def scattered_data_sets(comm):
    found = {}
    for n in (0, 1, 5, 12, 13):
        data = list(range(n)) if comm.rank == 0 else None
        for equal in (True, False):
            for shuffle, seed in ((False, None), (True, 3)):
                part = chainermn.scatter_dataset(
                    data, comm, shuffle=shuffle, seed=seed, force_equal_length=equal)
                found[f'{n} {equal} {shuffle}'] = [int(part[i]) for i in range(len(part))]
            found[f'{n} {equal} index'] = list(
                map(int, chainermn.scatter_index(n, comm, force_equal_length=equal)))
    return found


@same
def synchronized_order(comm):
    orders = []
    for seed in range(3):
        np.random.seed(seed + comm.rank)
        iterator = chainermn.iterators.create_synchronized_iterator(
            chainer.iterators.SerialIterator(list(range(10)), 4), comm)
        orders.append([next(iterator) for _ in range(6)])
    return orders


def small_trainer(comm, folder, stop=6):
    np.random.seed(comm.rank)
    x, t = digits_like(comm.rank, 8, (3,))
    model = L.Classifier(L.Linear(3, 2))
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.1), comm).setup(model)
    updater = training.StandardUpdater(chainer.iterators.SerialIterator(
        chainer.datasets.TupleDataset(x, t), 2, shuffle=False), optimizer)
    return training.Trainer(updater, (stop, 'iteration'), out=folder), model


@same
def snapshot_file_names(comm):
    found = {}
    for name, sets in {'one': [], 'first': [[0]]}.items():
        folder = shared_folder(comm)
        trainer, _ = small_trainer(comm, folder)
        trainer.extend(chainermn.extensions.multi_node_snapshot(
            comm, extensions.snapshot(n_retains=2), sets), trigger=(2, 'iteration'))
        trainer.run()
        comm.allreduce_obj(0)
        found[name] = sorted(os.listdir(folder))
    return found


@same
def checkpoint_files_and_resume(comm):
    """The state after loading; and, without the optimizer, the update that only broadcasts."""
    folder = shared_folder(comm)
    trainer, model = small_trainer(comm, folder, 5)
    checkpointer = chainermn.create_multi_node_checkpointer('run', comm, path=folder)
    checkpointer.finalize = lambda: None
    trainer.extend(checkpointer, trigger=(2, 'iteration'))
    trainer.run()
    trainer, model = small_trainer(comm, folder, 7)
    checkpointer = chainermn.create_multi_node_checkpointer('run', comm, path=folder)
    checkpointer.finalize = lambda: None
    checkpointer.maybe_load(trainer)  # waits for what is being written
    comm.allreduce_obj(0)
    files = sorted(map(os.path.basename, glob.glob(folder + '/run.*')))
    loaded = {'iteration': trainer.updater.iteration, 'W': model.predictor.W.array.tolist()}
    trainer.run()
    return {'files': files, 'loaded': loaded, 'W': model.predictor.W.array.tolist()}


@same
def operations(comm):
    """Values and shapes of the operations on arrays."""
    x = np.arange(6, dtype=np.float32).reshape(2, 3) * (comm.rank + 1)
    xs = tuple(x + i for i in range(comm.size))
    lists = {
        'bcast': comm.bcast(x), 'allreduce': comm.allreduce(x), 'allgather': comm.allgather(x),
        'gather': comm.gather(x), 'alltoall': comm.alltoall(xs),
        'scatter': comm.scatter(xs if comm.rank == 0 else None),
        'rows': comm.scatter(np.arange(2.0 * comm.size).reshape(-1, 2) if comm.rank == 0 else None),
    }
    if comm.rank == 0:
        comm.send(x, 1, 5)
        comm.send((x, x[0]), 1, 6)
    elif comm.rank == 1:
        lists['recv'] = comm.recv(0, 5)
        lists['tuple'] = comm.recv(0, 6)
    objects = {
        'bcast_obj': comm.bcast_obj({'a': 1} if comm.rank == 0 else None),
        'gather_obj': comm.gather_obj(comm.rank), 'allreduce_obj': comm.allreduce_obj([comm.rank]),
        'ranks': [comm.rank, comm.size, comm.intra_rank, comm.intra_size, comm.inter_rank,
                  comm.inter_size],
    }
    plain = {name: None if value is None else
             [[str(part.dtype), part.tolist()] for part in value] if isinstance(value, tuple) else
             [str(value.dtype), value.tolist()] for name, value in lists.items()}
    return {**plain, **objects}


def evaluate(comm, lengths):
    class Value(chainer.Chain):
        def forward(self, x):
            chainer.report({'mean': F.mean(x)}, self)

    begin = sum(lengths[:comm.rank])
    data = np.arange(begin, begin + lengths[comm.rank], dtype=np.float32) ** 2
    iterator = chainer.iterators.SerialIterator(data, 2, repeat=False, shuffle=False)
    evaluator = chainermn.create_multi_node_evaluator(
        extensions.Evaluator(iterator, Value()), comm)
    return {key: float(value) for key, value in evaluator().items()}


@same
def generic_evaluator_without_a_subclass(comm):
    data = [(np.float32(100 * comm.rank + i), np.int32(i)) for i in range(2 * comm.rank + 3)]
    iterator = chainer.iterators.SerialIterator(data, 2, repeat=False, shuffle=False)
    return chainermn.extensions.GenericMultiNodeEvaluator(
        comm, iterator, lambda x, t: [x.tolist(), t.tolist()])(None)


@same
def forms_of_replica_sets(comm):
    found = {}
    for sets in ([], [0], [0, 1], range(2), {1}, ((0, 1),), [[0], 1], [[0, 0]], [[]],
                 [[0], [0]], [-1], [[comm.size]], 1, [0.5]):
        snapshot = extensions.snapshot()

        def describe(sets=sets, snapshot=snapshot):
            ours = chainermn.extensions.multi_node_snapshot(comm, snapshot, sets)
            assert ours.snapshot is snapshot
            return [ours.is_master, ours.master, sorted(ours.replica_set), snapshot.filename]

        found[str(sets)] = outcome(describe)
    for name, sets in {'one': [0], 'pair': ((0, 1),)}.items():
        folder = shared_folder(comm)
        trainer, _ = small_trainer(comm, folder)
        trainer.extend(chainermn.extensions.multi_node_snapshot(
            comm, extensions.snapshot(filename=lambda t: f'at {t.updater.iteration}'), sets),
            trigger=(3, 'iteration'))
        trainer.run()
        comm.allreduce_obj(0)
        found[name] = sorted(os.listdir(folder))
        found[f'{name} is named'] = list(trainer._extensions)
    return found


@same
def a_communicator_of_ones_own(comm):
    class Own(MpiCommunicatorBase):
        def multi_node_mean_grad(self, model, zero_fill=False):
            for _, param in sorted(model.namedparams()):
                if param.grad is None and zero_fill and param.array is not None:
                    param.grad = np.zeros_like(param.array)
                if param.grad is not None:
                    param.grad[...] = self.allreduce(param.grad) / self.size

    own = Own(comm.mpi_comm)
    part = own.split(own.rank % 2, own.rank)
    return {**loss_curve(own, MLP, chainer.optimizers.MomentumSGD(0.1), (3, 4)),
            'part': [type(part).__name__, part.size, part.allreduce_obj(own.rank)]}


@same
def gradients_that_diverge_in_debug_mode(comm):
    model = L.Linear(2, 2)
    comm.bcast_data(model)
    model.cleargrads()
    for param in model.params():
        param.grad = np.full_like(param.array, np.nan if comm.rank == 1 else 1)
    with chainer.using_config('debug', True):
        try:
            comm.multi_node_mean_grad(model)
        except ValueError as error:
            return 'diverged' in str(error)


# --- fixed on purpose ---------------------------------------------------------------------------

def outcome(function):
    """What a call returns, or which error it raises."""
    try:
        return function()
    except Exception as error:
        return type(error).__name__


@fixed
def evaluator_weighs_by_examples(comm):
    return evaluate(comm, [2 * (rank + 1) for rank in range(comm.size)])


@fixed
def every_dtype(comm):
    return outcome(lambda: str(comm.allgather(np.ones(1, np.uint8))[0].dtype))


@fixed
def broadcast_of_none(comm):
    return outcome(lambda: 'None' if comm.bcast_obj(None) is None else 'something')


@fixed
def split_keeps_configuration(comm):
    comm = chainermn.create_communicator('naive')
    comm.set_config('batched_copy', True)
    return comm.split(0, comm.rank).get_config('batched_copy')


@fixed
def configuration_belongs_to_one_object(comm):
    one = chainermn.create_communicator('naive')
    other = chainermn.create_communicator('naive')
    one.set_config('batched_copy', False)
    other.set_config('batched_copy', True)
    return one.get_config(None).get('batched_copy')


@fixed
def checkpoints_after_an_error(comm):
    folder = shared_folder(comm)
    trainer, _ = small_trainer(comm, folder)
    trainer.extend(chainermn.create_multi_node_checkpointer('run', comm, path=folder),
                   trigger=(1, 'iteration'))

    def fail(trainer):
        raise RuntimeError('on purpose')

    trainer.extend(fail, trigger=(3, 'iteration'), priority=-1000)
    with open(os.devnull, 'w') as nowhere, contextlib.redirect_stderr(nowhere):
        outcome(trainer.run)
    return len(glob.glob(f'{folder}/run.{comm.rank}.*')) > 0


@fixed
def a_dot_in_the_name_of_a_run(comm):
    folder = shared_folder(comm)
    model = L.Linear(2, 2)
    chainermn.create_multi_node_checkpointer('v1.0', comm, path=folder).save(model, 3)
    loaded = copy.deepcopy(model)
    loaded.W.array[...] = 0
    chainermn.create_multi_node_checkpointer('v1.0', comm, path=folder).maybe_load(loaded)
    return bool((loaded.W.array == model.W.array).all())


@fixed
def scatter_takes_a_raw_mpi_communicator(comm):
    return outcome(lambda: len(chainermn.scatter_dataset([1, 2, 3, 4, 5, 6], comm.mpi_comm)))


@fixed
def older_names(comm):
    return {'all_to_all': outcome(lambda: len(chainermn.functions.all_to_all(
                comm, [np.ones(1, np.float32)] * comm.size))),
            'hierarchical': outcome(lambda: chainermn.create_communicator('hierarchical'))}


if __name__ == '__main__':
    out, *names = sys.argv[1:]
    warnings.simplefilter('ignore')
    comm = chainermn.create_communicator('naive')
    observed = {name: {**SAME, **FIXED}[name](comm) for name in names}
    observed['version'] = chainermn.__version__
    with open(f'{out}/{comm.rank}.json', 'w') as file:
        json.dump(observed, file)
