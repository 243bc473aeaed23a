"""The trainer's extensions do what they say, without a warning."""

import io
import json

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import training
from chainer.training import extensions

pytestmark = pytest.mark.mpi_skip

EPOCHS = 3


def pairs():
    random = np.random.RandomState(0)
    return chainer.datasets.TupleDataset(
        random.uniform(-1, 1, (20, 4)).astype('f'), (np.arange(20) % 3).astype('i'))


class Trained:
    """A small network and its trainer: 4 iterations an epoch, loss and accuracy reported."""

    def __init__(self, out, epochs=EPOCHS, optimizer=None):
        np.random.seed(1)
        self.model = L.Classifier(chainer.Sequential(L.Linear(4, 5), F.dropout, L.Linear(5, 3)))
        self.optimizer = (optimizer or chainer.optimizers.Adam(alpha=.01)).setup(self.model)
        self.iterator = chainer.iterators.SerialIterator(pairs(), 5)
        updater = training.StandardUpdater(self.iterator, self.optimizer)
        self.trainer = training.Trainer(updater, (epochs, 'epoch'), out=out)
        self.losses = []  # one of each iteration
        self.trainer.extend(
            lambda trainer: self.losses.append(float(trainer.observation['main/loss'].array)),
            trigger=(1, 'iteration'), priority=extensions.LogReport.priority + 1, name='losses')

    def extend(self, *args, **options):
        self.trainer.extend(*args, **options)
        return self

    def run(self):
        self.trainer.run()
        return self


@pytest.fixture
def trained(tmp_path):
    """``trained(epochs=3)`` makes a network and its trainer, which writes to ``tmp_path``."""
    return lambda **options: Trained(str(tmp_path), **options)


def test_log_print_and_progress_bar(trained, tmp_path, capsys):
    table = io.StringIO()
    of = trained(optimizer=chainer.optimizers.SGD(.1)).extend(extensions.LogReport()).extend(
        extensions.PrintReport(['epoch', 'main/loss'], out=table)).extend(
        extensions.ProgressBar(update_interval=1)).extend(
        extensions.ProgressBar((20, 'iteration'), 2, 30, bar := io.StringIO()), name='bar').extend(
        extensions.observe_lr()).run()
    log = json.loads(tmp_path.joinpath('log').read_text())
    assert [(line['epoch'], line['iteration']) for line in log] == [(1, 4), (2, 8), (3, 12)]
    means = np.reshape(of.losses, (EPOCHS, 4)).mean(1)
    np.testing.assert_allclose([line['main/loss'] for line in log], means, 1e-6)
    np.testing.assert_allclose([line['lr'] for line in log], .1)
    printed = [line.split() for line in table.getvalue().replace('\033[J', '').splitlines()]
    assert printed[0] == ['epoch', 'main/loss']
    assert [(int(epoch), float(loss)) for epoch, loss in printed[1:]] == [
        (i + 1, pytest.approx(mean, rel=1e-4)) for i, mean in enumerate(means)]
    assert f'     total [{"#" * 18}{"." * 12}] 60.00%' in bar.getvalue()
    assert bar.getvalue().count('this epoch [') == 6
    bar_on_stdout = capsys.readouterr().out
    assert f'     total [{"#" * 50}] 100.00%' in bar_on_stdout
    assert bar_on_stdout.count('this epoch [') == 12


@pytest.mark.parametrize(('extension', 'saved'), [
    (lambda: extensions.ExponentialShift('lr', .5), .5),
    (lambda: extensions.InverseShift('lr', .25, 2), 1.25 ** -2),
    (lambda: extensions.LinearShift('lr', (2, 1), (0, 2)), 1.5),
    (lambda: extensions.PolynomialShift('lr', 1, 4), .75),
    (lambda: extensions.StepShift('lr', .5, 1), .5),
], ids=lambda x: '' if isinstance(x, float) else x().__class__.__name__)
@pytest.mark.parametrize('lr', [1, np.array(1), 1., np.float32(1)])
def test_loading_into_a_shift_that_has_started(trained, extension, saved, lr):
    def start():
        shift, of = extension(), trained(optimizer=chainer.optimizers.SGD(lr=lr))
        shift.initialize(of.trainer)
        return shift, of

    shift, of = start()
    shift(of.trainer)
    assert of.optimizer.lr == saved
    file = io.BytesIO()
    chainer.serializers.save_npz(file, shift)
    file.seek(0)
    loaded, of = start()
    chainer.serializers.load_npz(file, loaded)
    loaded.initialize(of.trainer)
    assert of.optimizer.lr == saved
    shift(of.trainer)
    loaded(of.trainer)
    assert loaded._last_value == shift._last_value != saved


class Score(extensions.Evaluator):
    """Has no iterator, like the evaluators of BLEU scores in examples."""

    def evaluate(self):
        return {'score': 7}


def test_evaluator_and_statistics(trained, tmp_path):
    of = trained()
    of.extend(extensions.Evaluator(
        chainer.iterators.SerialIterator(pairs(), 7, repeat=False, shuffle=False), of.model,
        progress_bar=False))
    of.extend(Score({'main': None}, of.model), name='score')
    of.extend(extensions.ParameterStatistics(of.model.predictor[0], prefix='first'))
    of.extend(lambda trainer: chainer.report({'right': trainer.updater.iteration, 'all': 10}),
              trigger=(1, 'iteration'), priority=training.PRIORITY_WRITER, name='right')
    of.extend(extensions.MicroAverage('right', 'all', 'micro'), trigger=(1, 'iteration'))
    of.extend(extensions.FailOnNonNumber()).extend(extensions.unchain_variables())
    of.extend(extensions.LogReport()).run()
    last = json.loads(tmp_path.joinpath('log').read_text())[-1]
    batches = [slice(0, 7), slice(7, 14), slice(14, 20)]
    x, t = chainer.dataset.concat_examples(pairs())
    with chainer.using_config('train', False):
        losses = [float(of.model(x[batch], t[batch]).array) for batch in batches]
    assert last['validation/main/loss'] == pytest.approx(np.mean(losses), rel=1e-5)
    assert last['score'] == 7
    assert last['micro'] == pytest.approx((9 + 10 + 11 + 12) / 40)
    weights = of.model.predictor[0].W.array
    assert last['first/0/W/data/max'] == pytest.approx(weights.max(), rel=.1)
