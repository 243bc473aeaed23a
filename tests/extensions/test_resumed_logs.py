"""A resumed run continues the logs of an uninterrupted one, with Chainer's extensions.

One process saves each iteration, and resumes from some. The laws of states add ChainerMN's
extensions and several ranks, the laws of order all iterators.
"""
import io

import chainer
import numpy as np
import pytest
from chainer import iterators
from chainer.training import extensions, triggers

pytestmark = pytest.mark.mpi_skip

LENGTH, INTERVAL = 17, (5, 'iteration')


class Model(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.linear = chainer.links.Linear(2, 3, initialW=1)
        self.linear.name = 'linear'

    def forward(self, x):
        loss = chainer.functions.mean(self.linear(x) ** 2)
        chainer.report({'loss': loss}, self)
        return loss


def observe(trainer):
    """Report values of several types; some only in some iterations."""
    t = trainer.updater.iteration
    value = np.float32(np.sin(7 * t) / 3)
    chainer.report({'value': value, 'count': t, 'weight': 1.5 + t, 'sum': .3 * t,
                    'worse': np.float32(1 / 3 if t < 7 else t)})
    if t % 5 in (1, 2, 4):
        chainer.report({'rare': value * np.float32(1.1)})


def shift(kind, rates, **options):
    """Return an extension that shifts the learning rate of an optimizer of its own."""
    optimizer = chainer.optimizers.SGD(lr=1.).setup(chainer.links.Linear(1, 1))
    rates.append(optimizer)
    return kind('lr', optimizer=optimizer, **options)


def log(**options):
    return extensions.LogReport(trigger=INTERVAL, log_name=None, **options)


def every_extension(model, rates):
    """Return (extension, trigger) by name."""
    every = 2, 'iteration'
    return {
        'log': (log(), None), 'own': (log(keys=['rare']), None),
        'print': (extensions.PrintReport(['rare'], log(keys=['rare']), out=io.StringIO()), None),
        'plot': (extensions.PlotReport(['value', 'rare'], trigger=INTERVAL), None),
        'variables': (extensions.VariableStatisticsPlot(
            model.linear.W, max_sample_size=99, trigger=(100, 'iteration'),
            report_grad=False), None),
        'of a Variable': (extensions.MicroAverage('main/loss', 'weight', 'a', INTERVAL), None),
        'of an int': (extensions.MicroAverage('count', 'count', 'b', INTERVAL), None),
        'statistics': (extensions.ParameterStatistics(model.linear, trigger=INTERVAL), None),
        'exponential': (shift(extensions.ExponentialShift, rates, rate=.9), every),
        'finished': (shift(extensions.ExponentialShift, rates, rate=.5),
                     triggers.ManualScheduleTrigger([2, 6], 'iteration')),
        'multistep': (shift(extensions.MultistepShift, rates, gamma=.1, step_value=[2, 5],
                            init=.5), every),
        'warm-up': (shift(extensions.WarmupShift, rates, warmup_start=.1, warmup_iter=4, init=1),
                    every),
        **{f'{kind.__name__} of {key}': (None, kind(key, INTERVAL))
           for kind in (triggers.MinValueTrigger, triggers.MaxValueTrigger)
           for key in ('value', 'rare', 'main/loss')}}


class Run:
    """A training that writes down what is observed, logged and fires in each iteration."""

    def __init__(self, stop=(LENGTH, 'iteration'), extended=every_extension):
        model, self.rates, self.rows, self.saved, fired = Model(), [], {}, {}, []
        updater = chainer.training.StandardUpdater(
            iterators.SerialIterator(np.arange(14, dtype='f').reshape(7, 2) / 9, 2, shuffle=False),
            chainer.optimizers.MomentumSGD(.01).setup(model))
        self.trainer = trainer = chainer.training.Trainer(updater, stop, out='.')
        trainer.extend(observe, trigger=(1, 'iteration'), priority=1000)
        self.extensions = extended(model, self.rates)
        for name, (extension, trigger) in self.extensions.items():
            trainer.extend(extension or (lambda _, name=name: fired.append(name)),
                           name=name, trigger=trigger)

        def write(trainer):
            self.rows[updater.iteration] = repr((fired, [each.lr for each in self.rates], sorted(
                (key, float(getattr(value, 'array', value)))
                for key, value in trainer.observation.items())))
            fired.clear()
            serializer = chainer.serializers.DictionarySerializer()
            serializer.save(trainer)
            self.saved[updater.iteration] = {
                key: np.array(value) for key, value in serializer.target.items()}

        trainer.extend(write, name='journal', trigger=(1, 'iteration'), priority=-200)

    def resume(self, saved):
        chainer.serializers.NpzDeserializer(saved).load(self.trainer)
        return self.run()

    def run(self):
        self.trainer.run()
        return self

    def plots(self):
        points = self.extensions['plot'][0]._data
        return {key: [*map(list, values)] for key, values in points.items()}, [
            each.tolist() for each in self.extensions['variables'][0]._samples.get_data()]

    def logs(self):
        return [{key: entry[key] for key in entry if key != 'elapsed_time'}
                for name in ('log', 'own') for entry in self.extensions[name][0].log]


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore::PendingDeprecationWarning')  # of matplotlib
def test_every_extension_and_trigger(tmp_path, monkeypatch):
    pytest.importorskip('matplotlib').use('Agg')
    monkeypatch.chdir(tmp_path)
    expected = Run().run()
    for start in (4, 9, 14):
        found = Run().resume(expected.saved[start])
        assert found.rows == {t: row for t, row in expected.rows.items() if t > start}
        assert found.logs() == expected.logs()
        assert found.plots() == expected.plots()


def test_every_stop_trigger(tmp_path, monkeypatch):
    """Also from the iteration in which it fires: a completed training stays complete."""
    monkeypatch.chdir(tmp_path)

    def run():
        return Run(triggers.EarlyStoppingTrigger(
            (2, 'iteration'), 'worse', patience=2, max_trigger=(LENGTH, 'iteration')),
            lambda model, rates: {})

    expected = run().run()
    end = max(expected.rows)
    assert end < LENGTH
    for start in range(1, end + 1):
        assert run().resume(expected.saved[start]).trainer.updater.iteration == end, start


def multithread():
    return iterators.MultithreadIterator(
        range(8), 3, order_sampler=iterators.ShuffleOrderSampler(np.random.RandomState(7)))


def multiprocess():
    return iterators.MultiprocessIterator(range(8), 3, shuffle=False, n_processes=1, n_prefetch=2)


@pytest.mark.filterwarnings('ignore:.* multi-threaded, use of fork:DeprecationWarning')
@pytest.mark.parametrize('create, starts', [(multithread, range(1, 10)), (multiprocess, [4])])
def test_every_iterator(create, starts):
    """After the last batch of an epoch, the order of the next may have been drawn in advance."""
    iterator, states, batches = create(), [], []
    for _ in range(12):
        serializer = chainer.serializers.DictionarySerializer()
        serializer.save(iterator)
        states.append(serializer.target)
        batches.append(next(iterator))
    iterator.finalize()
    for start in starts:
        resumed = create()
        chainer.serializers.NpzDeserializer(states[start]).load(resumed)
        assert [next(resumed) for _ in batches[start:]] == batches[start:], start
        resumed.finalize()


def test_a_summary_of_weighted_values():
    summaries = [chainer.reporter.Summary() for _ in range(2)]
    summaries[0].add(np.float32(1 / 3), 1.5)
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(summaries[0])
    chainer.serializers.NpzDeserializer(serializer.target).load(summaries[1])
    for each in summaries:
        each.add(np.float32(2 / 3), .25)
    assert summaries[0].make_statistics() == summaries[1].make_statistics()
