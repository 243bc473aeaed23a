"""Likely mistakes in calls of public functions: the error on each rank says what is wrong."""

import chainer
import chainer.functions as CF
import chainer.links as L
import numpy as np
import pytest
from chainer.training import extensions as chainer_extensions
from each_case import each_case
from shared_fixtures import communicators

import chainermn
import chainermn.functions as F
from chainermn import datasets, extensions, iterators, links
from chainermn.communicators import compression

X = np.ones(3, 'f')
DATA = [(X, np.int32(0))] * 4

comm = communicators('naive')


def serial():
    return chainer.iterators.SerialIterator(DATA, 2, repeat=False, shuffle=False)


def evaluate(comm, result):
    evaluator = chainer_extensions.Evaluator(serial(), L.Classifier(L.Linear(3, 2)))
    evaluator.evaluate = lambda: result
    return chainermn.create_multi_node_evaluator(
        evaluator, comm, allow_different_models=True).evaluate()


def update(comm, lossfun):
    model = L.Linear(3, 2)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm)
    optimizer.setup(model).update(lossfun(model) if callable(lossfun) else lossfun)


def add(comm, *args, **kwargs):
    chainermn.MultiNodeChainList(comm).add_link(*args, **kwargs)


def rnn(comm, **kwargs):
    return links.create_multi_node_n_step_rnn(L.NStepLSTM(1, 3, 3, 0.), comm, **kwargs)


def checkpointer(comm, *args, **kwargs):
    return chainermn.create_multi_node_checkpointer(*args, comm, **kwargs)


def trainer():
    optimizer = chainer.optimizers.SGD().setup(L.Linear(3, 2))
    return chainer.training.Trainer(chainer.training.StandardUpdater(serial(), optimizer))


def pipeline(comm, **kwargs):
    return chainermn.Pipeline(chainermn.MultiNodeChainList(comm), CF.sum, **kwargs)


def snapshot(comm, argument):
    return extensions.multi_node_snapshot(comm, argument)


#: Calls that every rank makes, and a part of the error message.
WRONG = [
    (lambda c: add(c, L.Linear(3, 3), rank_in='0'), "rank_in must be a rank, a list of ranks or"),
    (lambda c: add(c, L.Linear(3, 3), rank_in=1.), 'rank_in must be a rank, a list of ranks or'),
    (lambda c: add(c, L.Linear(3, 3), rank_in=[]), 'or None, not []'),
    (lambda c: add(c, L.Linear(3, 3), rank_out=True), 'rank_out must be a rank'),
    (lambda c: add(c, L.Linear(3, 3), rank_out=['0']), "or None, not ['0']"),
    (lambda c: add(c, L.Linear(3, 3), rank_in=9), 'refers to rank 9, but ranks are 0 to'),
    (lambda c: add(c, L.Linear), 'not the class Linear. Pass an instance: Linear(...)'),
    (lambda c: add(c, None), 'link must be a chainer.Link, not None'),
    (lambda c: rnn(c, rank_in='0'), 'rank_in must be a rank or None'),
    (lambda c: rnn(c, rank_out=9), 'rank_out must be another rank, from 0 to'),
    (lambda c: rnn(c, rank_in=c.rank), 'rank_in must be another rank'),
    (lambda c: evaluate(c, None), "must return a dict of numbers, such as {'loss': 0.5}, not None"),
    (lambda c: evaluate(c, 1.), 'evaluate() must return a dict'),
    (lambda c: evaluate(c, {'loss': 'text'}), "but the value of 'loss' is 'text'"),
    (lambda c: evaluate(c, {'loss': None}), "but the value of 'loss' is None"),
    (lambda c: evaluate(c, {'loss': [1, 2]}), "but the value of 'loss' is [1, 2]"),
    (lambda c: evaluate(c, {'loss': np.array('text')}), "but the value of 'loss' is"),
    (lambda c: chainermn.create_multi_node_evaluator(L.Linear(3, 3), c),
     'not Linear. An evaluator has'),
    (lambda c: snapshot(c, lambda trainer: 0), 'filename is a string or a function; the function'),
    (lambda c: snapshot(c, chainer_extensions.snapshot), 'has no filename. Call it: snapshot()'),
    (lambda c: snapshot(c, None), 'the NoneType has no filename'),
    (lambda c: snapshot(c, chainer_extensions.snapshot(filename=None)), 'has filename=None'),
    (lambda c: F.send(c, X, 0), 'send(x, communicator, rank) needs a ChainerMN communicator'),
    (lambda c: F.send(X, 0, c), 'send(x, communicator, rank) needs a ChainerMN communicator'),
    (lambda c: F.recv(0, c), 'recv(communicator, rank) needs a ChainerMN communicator, not int'),
    (lambda c: F.recv(c, c.rank ^ 1, 5), 'Pass the tag by keyword: tag=5'),
    (lambda c: F.recv(c, c.rank ^ 1, 'x'), "delegate_variable must be a Variable, not 'x'"),
    (lambda c: F.bcast(X, c), 'bcast(comm, x) needs a ChainerMN communicator, not ndarray'),
    (lambda c: F.gather(X, c), 'gather(comm, x) needs a ChainerMN communicator'),
    (lambda c: F.scatter((X,), c), 'scatter(comm, xs) needs a ChainerMN communicator, not tuple'),
    (lambda c: F.alltoall((X,), c), 'alltoall(comm, xs) needs a ChainerMN communicator'),
    (lambda c: F.allgather(X, c), 'allgather(comm, x) needs a ChainerMN communicator'),
    (lambda c: F.allreduce(X, c), 'allreduce(comm, x) needs a ChainerMN communicator'),
    (lambda c: F.reduce_scatter(X, c), 'reduce_scatter(comm, xs) needs a ChainerMN communicator'),
    (lambda c: F.bcast(c, 'x'), 'expected Variables or arrays, but got str'),
    (lambda c: F.scatter(c, ['x'] * c.size), 'expected Variables or arrays, but got str'),
    (lambda c: F.gather(c, [X]), 'expected Variables or arrays, but got list'),
    (lambda c: F.allreduce(c, np.float32(1)), 'expected Variables or arrays, but got float32'),
    (lambda c: F.alltoall(c, [1.] * c.size), 'expected Variables or arrays, but got float'),
    (lambda c: chainermn.scatter_dataset(DATA, c, shuffle=True, seed='a'),
     "seed must be an integer from 0 to 2**32 - 1, or None, not 'a'"),
    (lambda c: chainermn.scatter_dataset(DATA, c, shuffle=True, seed=-1), 'or None, not -1'),
    (lambda c: chainermn.scatter_dataset(DATA, c, shuffle=True, seed=1.5), 'or None, not 1.5'),
    (lambda c: chainermn.scatter_dataset(c, DATA),
     'scatter_dataset: comm must be a ChainerMN or mpi4py communicator, not list. Check the order'),
    (lambda c: chainermn.create_multi_node_optimizer(c, chainer.optimizers.SGD()),
     'create_multi_node_optimizer(actual_optimizer, communicator) needs a ChainerMN communicator, '
     'not SGD. Check the order of the arguments.'),
    (lambda c: iterators.create_multi_node_iterator(c, DATA), 'Check the order of the'),
    (lambda c: extensions.AllreducePersistent(c, L.Linear(3)), 'Check the order of the arguments'),
    (lambda c: chainermn.scatter_index(4., c), 'n_total_samples must be an integer, not 4.0'),
    (lambda c: chainermn.scatter_index(DATA, c), 'not list; pass the length of the dataset'),
    (lambda c: datasets.create_empty_dataset(None), 'length, not NoneType. On ranks without'),
    (lambda c: datasets.create_empty_dataset(3), 'a dataset with a length, not int'),
    (lambda c: iterators.create_multi_node_iterator(DATA, c), 'SerialIterator(dataset, batch_size'),
    (lambda c: iterators.create_multi_node_iterator(None, c), 'batch_size), not NoneType'),
    (lambda c: chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), c,
                                                     n_accumulations='2'), "integer, not '2'"),
    (lambda c: update(c, chainer.Variable(X)), 'takes a function that returns the loss, not a '
                                               'Variable. For a loss that you have computed'),
    (lambda c: update(c, lambda model: lambda: None), 'must return the loss, a scalar Variable, '
                                                      'not None'),
    (lambda c: update(c, lambda model: lambda: 1.), 'a scalar Variable, not 1.0'),
    (lambda c: update(c, lambda model: lambda: model(np.ones((4, 3), 'f'))),
     'the loss must be a scalar, but has shape (4, 2). Reduce it'),
    (lambda c: links.MultiNodeBatchNormalization(c, 3), 'MultiNodeBatchNormalization(size, comm) '
                                                        'needs a ChainerMN communicator'),
    (lambda c: links.create_mnbn_model(L.Linear, c), 'needs a model (chainer.Link), not <class'),
    (lambda c: links.create_mnbn_model(None, c), 'needs a model (chainer.Link), not None'),
    (lambda c: checkpointer(c, None), 'name must be a string, and intervals must be integers'),
    (lambda c: checkpointer(c, 'x', cp_interval='5'), "cp_interval='5'"),
    (lambda c: extensions.ObservationAggregator(c, 'x', aggregator=5), 'must be a function'),
    (lambda c: extensions.MultiNodeEarlyStoppingTrigger(c, monitor=5), 'must be the key'),
    (lambda c: checkpointer(c, 'x').maybe_load(chainer.optimizers.SGD(), trainer()),
     'the trainer comes first: maybe_load(trainer, optimizer)'),
    (lambda c: iterators.ShardedIterator(c, 'x-*.npz', 5),
     'ShardedIterator(shards, batch_size, comm) needs a ChainerMN communicator, not int. Check'),
    (lambda c: pipeline(c, tied=['W']), "tied must be a dict of parameters by name, such as tied="),
    (lambda c: pipeline(c).gradient_clipping('5'), "a non-negative number, not '5'"),
    (lambda c: pipeline(c).gradient_clipping(chainer.optimizers.SGD()), 'is not a hook; it'),
    (lambda c: pipeline(c).gradient_clipping(float('nan')), 'a non-negative number, not nan'),
    (lambda c: c.allreduce_obj({}), "cannot combine the objects with op='sum'; allgather_obj"),
    (lambda c: c.send(0, X, 0), 'not an array of dtype float32 and shape (3,) and 0. Check'),
    (lambda c: checkpointer(c, 'a/b'), "but is 'a/b'; pass the folder as path='...'"),
    (lambda c: chainermn.kvstore.create('local').push(X, 'w'),
     'not an array of shape (3,). Pass the key as the first argument.'),
    (lambda c: chainermn.kvstore.create('local').set_updater(chainer.optimizers.SGD()),
     'not SGD. Pass an optimizer to set_optimizer'),
    (lambda c: datasets.write_shards('x', DATA, 2, c), 'prefix must be a path, not list. Check'),
    (lambda c: checkpointer(c, 'x').save(), "'iteration'. Call save(target, iteration, wait=True)"),
    (lambda c: checkpointer(c, 'x').maybe_load(1, 2, step=3), "'step'. Call maybe_load(trainer, "),
    (lambda c: extensions.MultiNodeEarlyStoppingTrigger(c, monitr='x'), "arguments ['monitr']"),
    (lambda c: chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(), c, compression=compression.PowerSGD),
     'Pass an instance: PowerSGD()'),
    (lambda c: chainermn.join(L.Linear(3)), 'needs a multi-node optimizer, not Linear. Create'),
    (lambda c: iterators.ShardedIterator('x-*.npz', 5, c, transform='float'),
     "transform must be a function, not 'float'"),
    (lambda c: chainermn.kvstore.create('dist_sync', c).init('w', 3.),
     'not float. Convert numbers and lists of numbers with np.array(value, np.float32)'),
    (lambda c: chainermn.kvstore.create('dist_sync', c).set_optimizer(
        chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), c)),
     'not MultiNodeOptimizer. Pass its actual_optimizer: the store combines the gradients'),
    (lambda c: trainer().extend(extensions.RunRecord), 'Pass an instance: RunRecord(...)'),
    (lambda c: trainer().extend(chainer_extensions.LogReport), 'not the class LogReport. Pass an'),
    (lambda c: c.bcast_data(L.Linear), 'but got the class Linear; pass an instance'),
]


@pytest.mark.compares_calls
@each_case('call, text', WRONG)
def test_the_error_says_what_is_wrong(comm, call, text):
    if comm.size == 1 and 'cannot combine' in text:
        return  # nothing is combined
    with pytest.raises((TypeError, ValueError)) as caught:
        call(comm)
    assert text in str(caught.value)
    assert len(str(caught.value)) < 900
    assert comm.allgather_obj(comm.rank) == [*range(comm.size)]  # no rank is behind


@pytest.mark.mpi(min_size=2)
@each_case('call', [
    lambda c, wrong: evaluate(c, None if wrong else {'loss': 1.}),
    lambda c, wrong: F.gather(c, 'x' if wrong else X),
    lambda c, wrong: F.bcast(c, 'x' if wrong else X, root=1),
    lambda c, wrong: F.scatter(c, ['x'] * c.size if wrong else None, root=1),
    lambda c, wrong: iterators.create_multi_node_iterator(DATA if wrong else serial(), c, 1),
    lambda c, wrong: update(c, lambda model: (
        lambda: None if wrong else CF.sum(model(np.ones((4, 3), 'f'))))),
])
def test_a_mistake_of_one_rank(comm, same_error, call):
    error = same_error(lambda: call(comm, comm.rank == 1), failed=1)
    assert isinstance(error, TypeError)
    assert comm.allgather_obj(comm.rank) == [*range(comm.size)]


@pytest.mark.mpi(min_size=2)
def test_the_receiver_raises_the_error_of_functions_send(comm):
    if comm.rank < 2:
        with pytest.raises(TypeError, match='expected a numpy or cupy array, but got str'):
            F.send('x', comm, 1) if comm.rank == 0 else F.recv(comm, 0)
    assert comm.allgather_obj(comm.rank) == [*range(comm.size)]


@each_case('call', [
    lambda c: add(c, L.Linear(3, 3), rank_in=np.int64(0), rank_out=np.array([0])),
    lambda c: add(c, L.Linear(3, 3), rank_in=(0,), rank_out=range(c.size)),
    lambda c: add(c, CF.relu, rank_out=[]),
    lambda c: evaluate(c, {'loss': np.float32(1), 'n': 2, 'all': X, 'ok': True, 'v':
                           chainer.Variable(np.array(1.))}),
    lambda c: evaluate(c, {1: 1., 'a': np.bool_(True)}),
    lambda c: evaluate(c, {}),
    lambda c: snapshot(c, chainer_extensions.snapshot(filename=lambda trainer: 'name')),
    lambda c: F.allreduce(c, np.array(1, 'f')),
    lambda c: F.bcast(c, X if c.rank == 0 else 'ignored'),
    lambda c: F.scatter(c, [X] * c.size if c.rank == 0 else None),
    lambda c: chainermn.scatter_dataset(DATA, c, shuffle=True, seed=np.array([1, 2])),
    lambda c: chainermn.scatter_index(np.int32(4), c),
    lambda c: datasets.create_empty_dataset(range(3)),
    lambda c: iterators.create_multi_node_iterator(serial() if c.rank == 0 else None, c),
    lambda c: checkpointer(c, 'x', cp_interval=np.int64(5)),
])
def test_correct_calls_stay_silent(comm, call):
    call(comm)
    assert comm.allgather_obj(comm.rank) == [*range(comm.size)]
