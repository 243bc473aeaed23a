"""Evaluators and checkpointers warn if the ranks train different models, and only then."""

import gc
import os
import pathlib
import subprocess
import sys

import chainer
import numpy as np
import pytest
from shared_fixtures import communicators

import chainermn
from chainermn.extensions._replica_check import ReplicaCheck

TESTS = str(pathlib.Path(__file__).parents[1])

START = '''
import sys, chainer, numpy as np, chainermn
import chainer.functions as F, chainer.links as L
from chainer.training import extensions
comm = chainermn.create_communicator('naive')
rank, size = comm.rank, comm.size
np.random.seed(rank)

def classifier():
    return L.Classifier(L.Linear(4, 3))

def iterator(**options):
    data = [(np.random.rand(4).astype('f'), np.int32(i % 3)) for i in range(8)]
    return chainer.iterators.SerialIterator(data, 2, **options)

def train(optimizer, folder, evaluated=None, comm=comm, checkpointed=True, **options):
    updater = chainer.training.StandardUpdater(iterator(), optimizer)
    trainer = chainer.training.Trainer(updater, (2, 'epoch'), out=folder)
    evaluator = extensions.Evaluator(iterator(repeat=False, shuffle=False),
                                     evaluated or optimizer.target)
    trainer.extend(chainermn.create_multi_node_evaluator(evaluator, comm, **options),
                   call_before_training=True)
    if checkpointed:
        trainer.extend(chainermn.create_multi_node_checkpointer('run', comm, **options),
                       trigger=(3, 'iteration'))
    trainer.run()

def made(comm=comm, **options):
    return chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(), comm, **options)
'''

#: Each is a job of its own, since a process warns once.
WRONG = {
    'evaluator': ('create_multi_node_evaluator', 'no multi-node optimizer trains this model', '''
train(chainer.optimizers.Adam().setup(classifier()), 'out')
'''),
    'checkpointer': ('create_multi_node_checkpointer', 'no multi-node optimizer trains', '''
updater = chainer.training.StandardUpdater(
    iterator(), chainer.optimizers.SGD().setup(classifier()))
trainer = chainer.training.Trainer(updater, (8, 'iteration'), out='out')
checkpointer = chainermn.create_multi_node_checkpointer('run', comm)
trainer.extend(checkpointer, trigger=(3, 'iteration'))
checkpointer.maybe_load(trainer)
trainer.run()
'''),
    'loop': ('create_multi_node_checkpointer', 'of model (Linear) differ', '''
model = L.Linear(2, 1)
optimizer = chainer.optimizers.SGD().setup(model)
comm.bcast_data(model)  # the same at first
checkpointer = chainermn.create_multi_node_checkpointer('run', comm, path='out')
for i in range(3):
    optimizer.update(lambda: F.sum(model(np.random.rand(3, 2).astype('f'))))
    checkpointer.save({'model': model, 'optimizer': optimizer}, i)
checkpointer.finalize()
'''),
    'generic evaluator on another root': ('GenericMultiNodeEvaluator', 'no multi-node', '''
model = classifier()
optimizer = chainer.optimizers.Adam().setup(model)
evaluate = chainermn.extensions.GenericMultiNodeEvaluator(
    comm, iterator(repeat=False), model, root=1)
evaluate.eval_func = lambda x, t: model(x, t).array
for _ in range(3):
    optimizer.update(model, np.random.rand(2, 4).astype('f'), np.zeros(2, 'i'))
    evaluate()
'''),
    'batch normalization of all ranks': ('create_multi_node_evaluator', 'no multi-node', '''
model = chainermn.links.create_mnbn_model(
    L.Classifier(chainer.Sequential(L.Linear(4, 4), L.BatchNormalization(4), L.Linear(4, 3))), comm)
train(chainer.optimizers.Adam().setup(model), 'out')
'''),
    'one model of two': ('create_multi_node_checkpointer', 'of dis (Linear) differ', '''
gen, dis = made().setup(L.Linear(2, 2)), chainer.optimizers.Adam().setup(L.Linear(2, 1))
class Updater(chainer.training.StandardUpdater):
    def update_core(self):
        z = np.random.rand(3, 2).astype('f')
        self.get_optimizer('gen').update(lambda: F.sum(dis.target(gen.target(z))))
        self.get_optimizer('dis').update(lambda: -F.sum(dis.target(gen.target(z))))
updater = Updater(iterator(), {'gen': gen, 'dis': dis})
trainer = chainer.training.Trainer(updater, (4, 'iteration'), out='out')
trainer.extend(chainermn.create_multi_node_checkpointer('run', comm), trigger=(2, 'iteration'))
trainer.run()
'''),
    'changed by an extension': (
        'create_multi_node_evaluator', 'the parameters have changed on some ranks only', '''
model = classifier()
optimizer = made().setup(model)
for _ in range(3):
    optimizer.update(model, np.random.rand(2, 4).astype('f'), np.zeros(2, 'i'))
evaluator = chainermn.create_multi_node_evaluator(extensions.Evaluator(
    iterator(repeat=False), model), comm)
evaluator()
if rank == 0:
    model.predictor.b.array[:] *= 2
evaluator()
evaluator()
'''),
}

CORRECT = '''
# Multi-node optimizers with all options, evaluated before the first update:
for n, options in enumerate(({}, {'n_accumulations': 2}, {'overlap': 'always'},
                             {'shard_states': True}, {'compression': 'fp16'}, {'zero_fill': True})):
    train(made(**options).setup(classifier()), f'options{n}')

# Running averages of batch normalization differ between ranks:
train(made().setup(L.Classifier(chainer.Sequential(
    L.Linear(4, 4), L.BatchNormalization(4), L.Linear(None, 3)))), 'statistics')

# Trained by rank 0 only, and copied by the program:
copied = classifier()
comm.bcast_data(copied)
chainermn.create_multi_node_evaluator(
    extensions.Evaluator(iterator(repeat=False), copied), comm)()

# Each rank trains a model of its own, which is meant:
train(chainer.optimizers.Adam().setup(classifier()), 'meant', allow_different_models=True)

# Models of different layers, as in an ensemble or a GAN on two ranks:
train(chainer.optimizers.Adam().setup(L.Classifier(L.Linear(4, 3 + rank))), 'layers')

# Groups of ranks that train a model each; the evaluator is that of the group, or of all:
group = comm.split(rank % 2, rank)
train(made(group).setup(classifier()), f'group{rank % 2}', comm=group)
train(made(group).setup(classifier()), 'groups', comm=comm)

# One of the models is trained by the others' optimizer; parameters of both in one model:
frozen = classifier()
comm.bcast_data(frozen)
both = made().setup(classifier())
class Pair(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.a, self.b = both.target, frozen
    def forward(self, x, t):
        return self.a(x, t) + self.b(x, t)
train(both, 'pair', evaluated=Pair())

# Averaged by the program, from time to time:
model = classifier()
local = chainer.optimizers.Adam().setup(model)
checkpointer = chainermn.create_multi_node_checkpointer('local', comm, path='local')
for i in range(6):
    local.update(model, np.random.rand(2, 4).astype('f'), np.zeros(2, 'i'))
    if i % 2:
        for param in model.params():
            param.array[...] = comm.allreduce(param.array) / size
    else:
        comm.allreduce_obj(1)
    checkpointer.save({'model': model}, i)
checkpointer.finalize()

# Layers, experts and stages with the same shapes on all ranks:
class Split(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.part = L.Linear(4, 3)
    def forward(self, x):
        return chainermn.functions.allreduce(comm, self.part(x))
class Experts(Split):
    def forward(self, x):
        received = chainermn.functions.alltoall(comm, [x] * size)
        return sum(chainermn.functions.alltoall(comm, [self.part(y) for y in received]))
for kind in Split, Experts:
    train(chainer.optimizers.Adam().setup(L.Classifier(kind())), kind.__name__)

def chain_list():
    parts = chainermn.MultiNodeChainList(comm)
    parts.add_link(L.Linear(4, 4), rank_in=None if rank == 0 else rank - 1,
                   rank_out=None if rank == size - 1 else rank + 1)
    return parts
for kind in 'list', 'pipeline':
    parts = chain_list()
    optimizer = chainer.optimizers.SGD().setup(parts)
    loss = F.softmax_cross_entropy
    checkpointer = chainermn.create_multi_node_checkpointer(kind, comm, path=kind)
    pipeline = chainermn.Pipeline(parts, loss, n_micro_batches=2)
    for i in range(4):
        x, t = np.ones((4, 4), 'f'), np.zeros(4, 'i')
        if kind == 'list':
            parts.cleargrads()
            y = parts(x) if rank == 0 else parts()
            (loss(y, t) if rank == size - 1 else y).backward()
            optimizer.update()
        else:
            optimizer.update(pipeline, x, t)
        checkpointer.save({'model': parts, 'optimizer': optimizer}, i)
    checkpointer.finalize()

# Key-value stores, evaluated before the first update; replicas of the asynchronous one differ:
for kind in 'dist_sync', 'dist_async':
    store = chainermn.kvstore.create(kind, comm)
    train(chainermn.kvstore.create_kvstore_optimizer(
        chainer.optimizers.SGD(), store).setup(classifier()), kind)
    store.close()

# The actual optimizer was used after the multi-node optimizer, with gradients of all:
model = classifier()
optimizer = made().setup(model)
for _ in range(2): optimizer.update(model, np.random.rand(2, 4).astype('f'), np.zeros(2, 'i'))
model.cleargrads()
model(np.random.rand(2, 4).astype('f'), np.zeros(2, 'i')).backward()
comm.multi_node_mean_grad(model)
optimizer.actual_optimizer.update()
evaluated = extensions.Evaluator(iterator(repeat=False), model)
chainermn.create_multi_node_evaluator(evaluated, comm)()

# Communicators of other libraries, about which nothing is known:
from version7 import Version7Communicator
train(chainer.optimizers.Adam().setup(classifier()), 'theirs', comm=Version7Communicator())

# Evaluators for other metrics, of one model and of several:
class Generic(chainermn.extensions.GenericMultiNodeEvaluator):
    def calc_local(self, *batch):
        return self._targets['main'](*batch).array

model = classifier()
optimizer = made().setup(model)
evaluators = [Generic(comm, iterator(repeat=False), model),
              Generic(comm, iterator(repeat=False), classifier(), allow_different_models=True)]
for _ in range(2):
    optimizer.update(model, np.random.rand(2, 4).astype('f'), np.zeros(2, 'i'))
    for each in evaluators:
        each()

# Evaluators without models:
class Plain:
    def evaluate(self):
        return {'rank': rank}
chainermn.create_multi_node_evaluator(Plain(), comm).evaluate()
'''


def run(folder, program, ranks):
    done = subprocess.run(
        ['mpiexec', '-n', str(ranks), sys.executable, '-W', 'ignore:RNN', '-c', START + program],
        text=True, capture_output=True, cwd=folder, check=False,
        env={**os.environ, 'PYTHONPATH': TESTS, 'OMP_NUM_THREADS': '1'})
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.mpi_skip
@pytest.mark.parametrize('case', WRONG)
def test_different_models(case, tmp_path):
    creator, text, program = WRONG[case]
    ranks = 3 if case == 'changed by an extension' else 2
    found = run(tmp_path, program, ranks)
    assert found.count('RuntimeWarning') == 1, found  # by one rank, once
    assert '<string>:' in found and f'RuntimeWarning: {creator}: the parameters of ' in found
    assert text in found
    assert f'pass allow_different_models=True to {creator}.' in found
    assert ('ranks 1-2: ' if ranks == 3 else 'rank 1: ') in found


@pytest.mark.mpi_skip
@pytest.mark.limit(150)
@pytest.mark.parametrize('ranks', [2, pytest.param(3, marks=pytest.mark.slow)])
def test_no_alarm(tmp_path, ranks):
    assert 'Warning' not in run(tmp_path, CORRECT, ranks)


comm = communicators('naive', 'version7')


@pytest.mark.every_size
def test_only_a_sample_is_read(comm, monkeypatch):
    """Of any layout, without a copy of large arrays, and the same on all ranks."""
    check = ReplicaCheck(comm, 'test', is_enabled=True)
    model = chainer.Sequential(*(chainer.links.Linear(1, 1) for _ in range(4)))
    for link, array in zip(model, [np.zeros((300, 500), 'f'), np.zeros((500, 300), 'f').T,
                                   np.zeros((0, 3), 'f'), np.array(1., 'f')], strict=True):
        link.W.array = array
    if comm.rank % 2:
        model[0].W.array = np.asfortranarray(model[0].W.array)
    seen = []
    to_cpu = chainer.cuda.to_cpu
    monkeypatch.setattr(chainer.cuda, 'to_cpu', lambda x: seen.append(x.size) or to_cpu(x))
    found = check.digests({'model': model})
    if hasattr(comm, '_n_calls_of_program') and comm.size > 1:
        assert sorted(seen) == [0, 1, 1, 1, 1, 1, 256, 256]
    else:
        assert not found and not seen
    assert len({repr(each) for each in comm.allgather_obj(found)}) == 1


@pytest.mark.every_size
def test_calls_on_communicators_that_no_longer_exist(naive):
    """Calls since the last comparison count, and earlier ones do not."""
    def call_on_another():
        chainermn.create_communicator('naive', naive.mpi_comm).barrier()
        gc.collect()

    check = ReplicaCheck(naive, 'test', is_enabled=True)
    models = {'model': chainer.links.Linear(1, 1)}
    assert bool(check.digests(models)) == (naive.size > 1)
    call_on_another()
    assert not check.digests(models)
    kept = chainermn.create_communicator('naive', naive.mpi_comm)
    kept.barrier()
    assert not check.digests(models)
    del kept
    gc.collect()
    assert bool(check.digests(models)) == (naive.size > 1)
