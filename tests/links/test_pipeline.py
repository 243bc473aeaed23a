"""Pipelines against one process with the same links, in plain Chainer and float64."""

import copy
import sys
import tracemalloc

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import training
from each_case import each_case
from jobs import run_job
from models_on_ranks import (
    WIDTH,
    Doubled,
    OneProcess,
    Part,
    build,
    chain,
    compare_gradients,
)
from shared_fixtures import create, raises_on_all

import chainermn
from chainermn import Pipeline
from chainermn._operations import common_error
from chainermn._timeline import summary, trace_files
from chainermn.links import MultiNodeChainList

pytestmark = pytest.mark.every_size


@pytest.fixture(scope='module')
def comm():
    comm = create('naive')
    if comm.size < 2:
        pytest.skip('takes two ranks')
    return comm


@pytest.fixture(autouse=True)
def float64():
    with chainer.using_config('dtype', np.dtype('d')):
        yield


def batch(n, seed=0):
    random = np.random.RandomState(seed)
    return random.randn(n, WIDTH), random.randint(0, WIDTH, n)


def run(pipeline, *args):
    pipeline._model.model.cleargrads()
    loss = pipeline(*args)
    loss.backward()
    return loss


def check_against(loss, link, one, expected, n):
    """Compare with a loss of ``one``, which has all links; this rank has the link number ``n``."""
    one.cleargrads()
    expected.backward()
    np.testing.assert_allclose(loss.array, expected.array, 1e-12)
    np.testing.assert_allclose(link.W.grad, one[n].W.grad, 1e-10)


def test_gradients_are_added_by_backward_only(comm):
    """As those of any loss; the loss can be part of another one."""
    links = chain(comm.size)
    model, own = build(links, comm)
    reference = OneProcess(links)
    x, t = batch(6)
    reference.accumulate(x, t, 3)
    expected = {name: part.fc.W.grad for name, part in reference.parts.items()}
    pipeline = Pipeline(model, F.softmax_cross_entropy, 3)
    model.cleargrads()
    first, second = pipeline(x, t), pipeline(x, t)
    for link in own.values():
        assert link.fc.W.grad is None
    (2 * first).backward()
    second.backward()
    for name, link in own.items():
        np.testing.assert_allclose(link.fc.W.grad, 3 * expected[name], 1e-12)


class Head(chainer.Chain):
    """A loss with a layer."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.fc = L.Linear(WIDTH, WIDTH, initialW=np.random.RandomState(9).randn(WIDTH, WIDTH))

    def forward(self, y, t):
        return F.softmax_cross_entropy(self.fc(y), t)


def test_a_loss_function_with_parameters(comm):
    """It is not part of the model, but ``backward()`` also computes its gradients."""
    links = chain(comm.size)
    model, own = build(links, comm)
    reference, head, expected = OneProcess(links), Head(), Head()
    x, t = batch(6)
    loss = Pipeline(model, head, 3)(x, t)
    for link in model, head, reference, expected:
        link.cleargrads()
    loss.backward()
    expected(reference(x), t).backward()
    compare_gradients(own, reference)
    if comm.rank == comm.size - 1:
        np.testing.assert_allclose(head.fc.W.grad, expected.fc.W.grad, 1e-10)
    else:
        assert head.fc.W.grad is None


class Keeps(chainer.FunctionNode):
    """Keeps an array until backward, as most functions do."""

    def forward(self, xs):
        self.retain_outputs((0,))
        return xs[0] + 1,

    def backward(self, indexes, gys):
        self.get_retained_outputs()
        return gys


class ManyActivations(Doubled):
    def forward(self, x):
        for _ in range(4):
            x, = Keeps().apply((x,))
        return x


def test_memory(comm):
    """In bytes: with 1F1B, stages keep the activations of fewer micro-batches than with GPipe."""
    model, _ = build(chain(comm.size, [ManyActivations]), comm)
    x, t = np.ones((2, 32, 5000))
    peaks = {}
    for schedule in ('1f1b', 'gpipe'):
        pipeline = Pipeline(model, F.mean_squared_error, 16, schedule)
        tracemalloc.start()
        try:
            run(pipeline, x, t)
            peaks[schedule] = comm.allreduce_obj(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks['gpipe'] > comm.size * 4 * x.nbytes
    assert peaks['1f1b'] < .35 * peaks['gpipe'], peaks


def test_another_output_of_a_recomputation_is_an_error(comm):
    """Of a stage that counts in a variable of the program; rounding is none."""
    factors = []

    class Counts(Part):
        def outputs(self, y):
            factors.append(len(factors))
            return y * changed(len(factors))

    model, _ = build(chain(comm.size, [Counts, Part]), comm)
    pipeline = Pipeline(model, F.softmax_cross_entropy, 1, recompute=True)
    changed = lambda n: 1 + 1e-14 * n  # noqa: E731
    run(pipeline, *batch(4))
    changed = lambda n: n  # noqa: E731
    with raises_on_all(RuntimeError, 'the second forward pass of stage 0, micro-batch 0 (link 0 '
                       '(Counts, rank_in=None', 'returned a different output',
                       'pass recompute=False'):
        pipeline(*batch(4))


def test_a_tuple_of_one_arrives_as_its_element(comm):
    """As without Pipeline, also on the same rank."""
    class InTuple(Part):
        def outputs(self, y):
            return y,

    class Takes(Part):
        def forward(self, x):
            return super().forward(2 * x)

    model, own = build([('a', InTuple, 0, None), ('b', InTuple, 0, ['a']),
                        ('c', Takes, comm.size - 1, ['b'])], comm)
    x, t = batch(6)
    loss = run(Pipeline(model, F.softmax_cross_entropy, 2), x, t)
    found = {name: link.fc.W.grad for name, link in own.items()}
    model.cleargrads()
    y = model(x) if comm.rank == 0 else model()
    if comm.rank == comm.size - 1:
        y = F.softmax_cross_entropy(y, t)
        np.testing.assert_allclose(loss.array, y.array, 1e-12)
    if y is not None:
        y.backward()
    for name, link in own.items():
        np.testing.assert_allclose(found[name], link.fc.W.grad, 1e-10)


def test_wrong_tied_parameters(comm):
    model, own = build(chain(comm.size), comm)
    fc = own[f'{comm.rank}'].fc
    pipeline = Pipeline(model, F.softmax_cross_entropy, tied={'v': fc.b} if comm.rank == 1 else {})
    with raises_on_all(ValueError, "the tied parameter 'v' differs", ': not shared',
                       'rank 1: (4,) float64'):
        pipeline(*batch(4))
    pipeline = Pipeline(model, F.softmax_cross_entropy, tied=[
        {'w': fc.W}, {'w': fc.b}, {}, {}][comm.rank])
    with raises_on_all(ValueError, "the tied parameter 'w' differs", 'rank 0: (4, 4) float64',
                       'rank 1: (4,) float64'):
        pipeline(*batch(4))
    with fc.init_scope():
        fc.late = chainer.Parameter()
    pipeline = Pipeline(model, F.softmax_cross_entropy, tied={'late': fc.late})
    with raises_on_all(ValueError, "the tied parameter 'late' differs", ': not initialized'):
        pipeline(*batch(4))
    with raises_on_all(ValueError, "the tied parameter 'w' is not a parameter of the model"):
        Pipeline(model, F.softmax_cross_entropy, tied={'w': chainer.Parameter(np.ones(3))})


# --- how users call it ----------------------------------------------------------------------------

def linear(n):
    return L.Linear(WIDTH, WIDTH, initialW=np.random.RandomState(n).randn(WIDTH, WIDTH))


def one_link_each(comm, kind=MultiNodeChainList):
    """Return a list for a chain of linear links, one on each rank."""
    model = kind(comm)
    model.add_link(linear(comm.rank), comm.rank - 1 if comm.rank else None,
                   comm.rank + 1 if comm.rank < comm.size - 1 else None)
    return model


def train(model, function, tmp_path, evaluate=None, has_targets=True):
    """Train with a Trainer; return the log."""
    x, t = batch(20)
    examples = chainer.datasets.TupleDataset(x, t) if has_targets else x
    optimizer = chainer.optimizers.MomentumSGD(.1).setup(model)
    updater = training.StandardUpdater(
        chainer.iterators.SerialIterator(examples, 7, shuffle=False), optimizer,
        loss_func=function)
    trainer = training.Trainer(updater, (2, 'epoch'), tmp_path)
    trainer.extend(training.extensions.Evaluator(
        chainer.iterators.SerialIterator(examples, 7, repeat=False, shuffle=False), model,
        eval_func=evaluate))
    log = training.extensions.LogReport(trigger=(1, 'iteration'))
    trainer.extend(log)
    trainer.run()
    return [{key: value for key, value in each.items() if key != 'elapsed_time'}
            for each in log.log]


def test_trainer_evaluator_and_log(comm, tmp_path):
    """All ranks report what one process reports."""
    one = L.Classifier(chainer.Sequential(*map(linear, range(comm.size))))
    expected = train(one, None, tmp_path)
    model = one_link_each(comm)
    if comm.rank == comm.size - 1:
        model = L.Classifier(model)
    pipeline = Pipeline(model, n_micro_batches=3)
    found = train(model, pipeline, tmp_path, evaluate=pipeline,
                  has_targets=comm.rank == comm.size - 1)
    assert len(found) == len(expected) == 6
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert {'main/loss', 'main/accuracy'} <= ours.keys()
        for key, value in theirs.items():
            np.testing.assert_allclose(ours[key], value, 1e-5, err_msg=key)
    assert {'validation/main/loss', 'validation/main/accuracy'} <= found[2].keys()


class WithMistake(chainer.Chain):
    def forward(self, x, t):
        raise ValueError('a mistake')


@pytest.mark.parametrize('debug', ['0', '1'])
@pytest.mark.parametrize('link, text', [
    (lambda: L.Linear(WIDTH, WIDTH), '\nLinear raised '),
    (lambda: L.EmbedID(WIDTH, WIDTH), '\nEmbedID raised TypeError: ')])
def test_a_target_without_a_function_of_loss_is_explained(comm, monkeypatch, debug, link, text):
    monkeypatch.setenv('CHAINERMN_DEBUG', debug)
    model = MultiNodeChainList(comm.split(comm.rank, 0))
    model.add_link(link())
    with pytest.raises(TypeError) as caught:
        Pipeline(model)(*batch(4))
    assert str(caught.value).startswith('Pipeline: Without lossfun, Pipeline passes all arguments')
    assert 'pass lossfun' in str(caught.value) and text in str(caught.value)
    frames = common_error.visible_frames(caught.value)
    if debug == '1':
        assert frames is None and caught.value.__cause__ is not None
    else:
        assert frames.tb_next is None and frames.tb_frame.f_code.co_filename == __file__
        assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_an_error_of_a_users_link_without_a_function_of_loss_is_kept(comm):
    model = MultiNodeChainList(comm.split(comm.rank, 0))
    model.add_link(WithMistake())
    with pytest.raises(ValueError, match=r'^a mistake') as caught:
        Pipeline(model)(*batch(4))
    assert 'pass lossfun' in caught.value.__notes__[0]


def test_a_pipeline_in_place_of_the_model_and_the_model_in_place_of_the_pipeline(comm):
    model = MultiNodeChainList(comm)
    model.add_link(L.Linear(WIDTH, WIDTH), rank_in=comm.rank - 1 if comm.rank else None,
                   rank_out=comm.rank + 1 if comm.rank < comm.size - 1 else None)
    pipeline = Pipeline(model, F.softmax_cross_entropy)
    optimizer = chainer.optimizers.SGD()
    for one in optimizer, chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm):
        with pytest.raises(TypeError, match=r'a chainer\.Link, not Pipeline\. Pass'):
            one.setup(pipeline)
    optimizer.setup(model)
    for name in 'update', 'params':
        with pytest.raises(AttributeError, match='a loss function, not a model'):
            getattr(pipeline, name)
    assert copy.copy(pipeline).schedule == '1f1b'
    if comm.rank == 0:
        with pytest.raises(ValueError, match='ambiguous') as caught:
            optimizer.update(model, *batch(4))
        if sys.version_info >= (3, 11):
            assert 'pass the Pipeline: optimizer.update(pipeline' in caught.value.__notes__[-1]
    optimizer.update(pipeline, *batch(4))


def test_a_loss_for_each_example_is_an_error(comm):
    model = MultiNodeChainList(comm.split(comm.rank, 0))
    model.add_link(L.Linear(WIDTH, WIDTH))
    pipeline = Pipeline(model, lambda y, t: F.softmax_cross_entropy(y, t, reduce='no'), 1)
    with pytest.raises(TypeError, match=r'a scalar Variable, not Variable of shape \(4,\)'):
        pipeline(*batch(4))


def test_a_classifier_around_first_and_last_link(comm, tmp_path):
    """As in examples/mnist; the code around the list runs once more, without effect."""
    one = L.Classifier(chainer.Sequential(*(linear(n) for n in range(3))))
    expected = train(one, None, tmp_path)
    if comm.rank > 1:
        group = comm.split(1, comm.rank)
        return
    group = comm.split(0, comm.rank)
    model = MultiNodeChainList(group)
    if comm.rank == 0:
        model.add_link(linear(0), None, 1)
        model.add_link(linear(2), 1, None)
        model = L.Classifier(model)
    else:
        model.add_link(linear(1), 0, 0)
    found = train(model, Pipeline(model), tmp_path)
    if comm.rank == 0:
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours['main/loss'], theirs['main/loss'], 1e-5)
            np.testing.assert_allclose(ours['main/accuracy'], theirs['main/accuracy'], 1e-5)


def test_batches_that_are_dicts(comm):
    """The first link gets the inputs by name, and L.Classifier takes the target."""
    x, t = batch(6)
    last = comm.rank == comm.size - 1
    model = one_link_each(comm)
    pipeline = Pipeline(L.Classifier(model, label_key='t') if last else model, n_micro_batches=2)
    loss = pipeline(**{'x': x, 't': t} if last else {'x': x} if comm.rank == 0 else {})
    one = chainer.Sequential(*map(linear, range(comm.size)))
    np.testing.assert_allclose(loss.array, F.softmax_cross_entropy(one(x), t).array, 1e-12)


def test_forward_of_a_subclass(comm):
    """It prepares the inputs, and changes the output."""
    class Scaled(MultiNodeChainList):
        def forward(self, *xs):
            return 3 * super().forward(*(x / 2 for x in xs))

    model = one_link_each(comm, Scaled)
    x, t = batch(8)
    loss = run(Pipeline(model, F.softmax_cross_entropy, 2), x, t)
    one = chainer.Sequential(*map(linear, range(comm.size)))
    check_against(loss, model[0], one, F.softmax_cross_entropy(3 * one(x / 2), t), comm.rank)


def test_with_data_parallelism(comm):
    """Pipelines of two ranks, whose gradients the multi-node optimizer averages."""
    if comm.size != 4:
        return
    row, column = divmod(comm.rank, 2)
    model_comm, data_comm = comm.split(row, comm.rank), comm.split(column, comm.rank)
    for n_accumulations in (1, 2):
        model = one_link_each(model_comm)
        optimizer = chainermn.create_multi_node_optimizer(
            chainer.optimizers.SGD(.1), data_comm, n_accumulations=n_accumulations).setup(model)
        pipeline = Pipeline(model, F.softmax_cross_entropy, 2)
        one = chainer.Sequential(*map(linear, range(2)))
        expected = chainer.optimizers.SGD(.1).setup(one)
        optimizer.update(pipeline, *batch(4))  # copies the parameters
        for step in range(2):
            x, t = batch(8 * n_accumulations, step)
            expected.update(L.Classifier(one), x, t)
            for n in range(n_accumulations):
                own = slice((2 * n + row) * 4, (2 * n + row + 1) * 4)
                optimizer.update(pipeline, x[own], t[own])
        np.testing.assert_allclose(model[0].W.array, one[column].W.array, 1e-10)


def test_evaluation_keeps_no_graph(comm):
    model, _ = build(chain(comm.size), comm)
    with chainer.no_backprop_mode():
        loss = Pipeline(model, F.softmax_cross_entropy, 4)(*batch(8))
    assert loss.creator is None
    reference = OneProcess(chain(comm.size))
    np.testing.assert_allclose(loss.array, reference.accumulate(*batch(8), 1), 1e-12)


def test_own_communication_in_a_model_without_list(comm):
    """Ranks call send and recv themselves, as in examples/seq2seq."""
    class Own(chainer.Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.fc = linear(comm.rank)

        def forward(self, x, t):
            if comm.rank > 0:
                x = chainermn.functions.recv(comm, comm.rank - 1)
            y = self.fc(x)
            if comm.rank < comm.size - 1:
                return chainermn.functions.send(y, comm, comm.rank + 1)
            return F.softmax_cross_entropy(y, t)

    model = Own()
    x, t = batch(8)
    pipeline = Pipeline(model, n_micro_batches=4, communicator=comm)
    loss = run(pipeline, x, t)
    with chainer.no_backprop_mode():
        by_name = pipeline(x, t=t)
    np.testing.assert_array_equal(by_name.array, loss.array)
    one = chainer.Sequential(*map(linear, range(comm.size)))
    check_against(loss, model.fc, one, F.softmax_cross_entropy(one(x), t), comm.rank)


# --- wrong calls ----------------------------------------------------------------------------------

def test_links_that_wait_for_each_other(comm):
    model = MultiNodeChainList(comm)
    if comm.rank < 2:
        model.add_link(Part('a'), 1 - comm.rank, 1 - comm.rank)
    with raises_on_all(ValueError, 'links wait for each other',
                       'link 0 (Part, rank_in=1, rank_out=1) of MultiNodeChainList needs'):
        Pipeline(model, F.softmax_cross_entropy)(*batch(4))


def test_a_model_without_links(comm):
    with raises_on_all(ValueError, 'has no links on any rank. Call add_link('):
        Pipeline(MultiNodeChainList(comm), F.softmax_cross_entropy)(*batch(4))


def test_different_batches(comm):
    model, _ = build(chain(comm.size), comm)
    pipeline = Pipeline(model, F.softmax_cross_entropy)
    with raises_on_all(ValueError, 'numbers of examples differ', 'rank 0: 5',
                       f'rank {comm.size - 1}: 4'):
        pipeline(*batch(5 if comm.rank == 0 else 4))
    with raises_on_all(ValueError, 'the arguments have different numbers of examples: 5, 4'):
        pipeline(batch(5)[0], batch(4)[1])
    run(pipeline, *batch(4))  # training continues


def test_targets_of_different_batches(comm, recwarn):
    """One warning on rank 0, but not for placeholders, nor for batches after the first ones."""
    pipeline = Pipeline(one_link_each(comm), F.softmax_cross_entropy)
    x, t = batch(5)
    last = comm.rank == comm.size - 1
    for target in t, None if comm.rank == 0 else t, np.zeros_like(t) if comm.rank == 0 else t:
        run(Pipeline(one_link_each(comm), F.softmax_cross_entropy), x, target)
    for _ in range(3):
        run(pipeline, x, t)
    run(pipeline, x, t[::-1].copy() if last else t)
    assert not recwarn.list
    pipeline = Pipeline(one_link_each(comm), F.softmax_cross_entropy)
    for _ in range(2):  # one warning
        run(pipeline, x, t[::-1].copy() if last else t)
    found = [str(each.message) for each in recwarn.list]
    assert len(found) == (comm.rank == 0)
    if found:
        assert f'rank 0 and rank {comm.size - 1} passed different targets' in found[0]
        assert 'create_synchronized_iterator' in found[0]
        assert recwarn.list[0].filename == __file__


def test_different_options(comm):
    """The ranks also differ in whether they compute gradients, as if only some evaluated."""
    model, _ = build(chain(comm.size), comm)
    with raises_on_all(ValueError, 'the options differ', 'rank 0: n_micro_batches=2',
                       'n_micro_batches=3', 'enable_backprop=False', 'enable_backprop=True'), (
            chainer.using_config('enable_backprop', comm.rank > 0)):
        Pipeline(model, F.softmax_cross_entropy, 3 if comm.rank else 2)(*batch(4))


@each_case('options, text', [
    ({'n_micro_batches': 0}, 'n_micro_batches must be a positive integer, not 0'),
    ({'n_micro_batches': 1.5}, 'not 1.5'),
    ({'schedule': 'zero'}, "schedule must be one of ('1f1b', 'gpipe'), not 'zero'")])
def test_wrong_options(comm, options, text):
    model, _ = build(chain(comm.size), comm)
    with raises_on_all(ValueError, text):
        Pipeline(model, F.softmax_cross_entropy, **options)


PROGRAM = '''
import os, signal
import chainer, chainermn, numpy as np
import chainer.functions as F, chainer.links as L
comm = chainermn.create_communicator('naive')

class Part(L.Linear):
    calls = 0
    def forward(self, x):
        self.calls += 1
        if self.calls == 3:
            FAILURE
        return super().forward(x)

model = chainermn.MultiNodeChainList(comm)
model.add_link(Part(3, 3), comm.rank - 1 if comm.rank else None,
               comm.rank + 1 if comm.rank < comm.size - 1 else None)
pipeline = chainermn.Pipeline(model, F.softmax_cross_entropy, 4)
pipeline(np.ones((8, 3), 'f'), np.zeros(8, 'i'))
print('not reached')
'''


@pytest.mark.slow
@pytest.mark.mpi_skip
@pytest.mark.parametrize('failure, texts', [
    ('if comm.rank == 1: os.kill(os.getpid(), signal.SIGKILL)', ['rank 1']),
    ('if comm.rank == 1: raise RuntimeError("in a stage")', [
        'rank 1', 'in a stage', *['in the forward step of stage 1, micro-batch 2 of Pipeline'] * (
            sys.version_info >= (3, 11))]),
    ('if comm.rank == 1: comm.recv(2, 5)', [
        'deadlock', 'stage 2, micro-batch 2', 'of Pipeline (link 0 (Part, rank_in=1']),
], ids=['killed', 'an error', 'deadlock'])
def test_a_failure_inside_a_schedule_ends_the_job(tmp_path, failure, texts):
    done = run_job(tmp_path, PROGRAM.replace('FAILURE', failure), ranks=3)
    assert done.returncode != 0
    assert 'not reached' not in done.stdout
    for text in texts:
        assert text in done.stdout, done.stdout


# --- resume, timeline, examples -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.mpi_skip
def test_the_timeline_shows_steps_and_bubbles(tmp_path):
    done = run_job(tmp_path, PROGRAM.replace('FAILURE', 'pass'), CHAINERMN_TIMELINE='out.json')
    assert done.returncode == 0, done.stdout
    run = trace_files.read(sorted(tmp_path.glob('out.*.json')))
    names = [{event.name for event in rank.events} for rank in run.ranks]
    for rank in range(2):
        assert {f'{direction} of stage {rank}, micro-batch {k}'
                for direction in ('forward', 'backward') for k in range(4)} <= names[rank]
    assert 'Pipeline of 2 ranks, 4 micro-batches: ' in summary.text(run)

