"""Models, optimizers and a trainer that run with Chainer 1.24 to 7.8.1, and their snapshots.

With an old version of Chainer on Python 2.7 or 3.6, and h5py, this writes one file of test data:

    python write_snapshots.py FOLDER
"""

import os
import pickle
import shutil
import sys
import tempfile
import warnings
import zipfile

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import optimizers, serializers, training
from chainer.training import extensions

IS_PYTHON2 = sys.version_info[0] == 2
N_UPDATES = 3
SAVED_AT, LENGTH = 5, 12  # iterations of the trainer; an epoch has 3.5


def values(*shape, **kwargs):
    n = int(np.prod(shape))
    return np.sin(np.arange(n) * kwargs.get('step', 1.7)).astype('f').reshape(shape)


def ids(*shape):
    return (np.arange(int(np.prod(shape))) % 4).astype('i').reshape(shape)


SEQUENCES = [values(3, 2), values(2, 2, step=.9)]

#: By name: a function that makes the link, and one that calls it.
LINKS = {
    'linear': (lambda: L.Linear(4, 3), lambda link: link(values(2, 4))),
    'linear_none': (lambda: L.Linear(None, 3), lambda link: link(values(2, 4))),
    'conv': (lambda: L.Convolution2D(2, 3, 3, pad=1), lambda link: link(values(2, 2, 3, 3))),
    'deconv': (lambda: L.Deconvolution2D(2, 3, 3), lambda link: link(values(1, 2, 2, 2))),
    'bn': (lambda: L.BatchNormalization(3), lambda link: link(values(4, 3))),
    'bn_conv': (lambda: L.BatchNormalization(2), lambda link: link(values(2, 2, 3, 3))),
    'layer_norm': (lambda: L.LayerNormalization(4), lambda link: link(values(2, 4))),
    'embed': (lambda: L.EmbedID(5, 4), lambda link: link(ids(3))),
    'lstm': (lambda: L.LSTM(4, 3),
             lambda link: (link(values(2, 4)), link(values(2, 4, step=.9)))[1]),
    'peephole': (lambda: L.StatefulPeepholeLSTM(4, 3), lambda link: link(values(2, 4))),
    'gru': (lambda: L.StatefulGRU(4, 3), lambda link: (link(values(2, 4)), link(values(2, 4)))[1]),
    'n_step_lstm': (lambda: L.NStepLSTM(2, 2, 3, 0.),
                    lambda link: F.concat(list(link(None, None, SEQUENCES)[-1]), axis=0)),
    'n_step_bigru': (lambda: L.NStepBiGRU(1, 2, 3, 0.),
                     lambda link: F.concat(list(link(None, SEQUENCES)[-1]), axis=0)),
    'prelu': (lambda: L.PReLU(), lambda link: link(values(2, 4))),
    'parameter': (lambda: L.Parameter(values(2, 3)), lambda link: link() * 2),
    'scale': (lambda: L.Scale(W_shape=(3,), bias_term=True), lambda link: link(values(2, 3))),
    'maxout': (lambda: L.Maxout(4, 2, 3), lambda link: link(values(2, 4))),
    'highway': (lambda: L.Highway(4), lambda link: link(values(2, 4))),
    'bilinear': (lambda: L.Bilinear(2, 3, 2), lambda link: link(values(2, 2), values(2, 3))),
    'inception': (lambda: L.Inception(2, 1, 1, 1, 1, 1, 1), lambda link: link(values(1, 2, 3, 3))),
    'hsm': (lambda: L.BinaryHierarchicalSoftmax(3, L.BinaryHierarchicalSoftmax.
                                                create_huffman_tree({0: 3, 1: 2, 2: 2, 3: 1})),
            lambda link: link(values(4, 3), ids(4))),
    'crf': (lambda: L.CRF1d(4), lambda link: link([values(2, 4), values(2, 4, step=.9)],
                                           [ids(2), ids(2)])),
    'mlpconv': (lambda: L.MLPConvolution2D(2, (2, 3), 2), lambda link: link(values(1, 2, 3, 3))),
    'list': (lambda: chainer.ChainList(L.Linear(4, 3), L.Linear(3, 2)),
             lambda link: link[1](link[0](values(2, 4)))),
}

OPTIMIZERS = {
    'sgd': lambda: optimizers.SGD(.1), 'momentum': lambda: optimizers.MomentumSGD(.1),
    'nesterov': lambda: optimizers.NesterovAG(.1), 'adam': lambda: optimizers.Adam(.01),
    'adagrad': lambda: optimizers.AdaGrad(.1), 'adadelta': lambda: optimizers.AdaDelta(),
    'rmsprop': lambda: optimizers.RMSprop(.1), 'graves': lambda: optimizers.RMSpropGraves(.01),
    'smorms3': lambda: optimizers.SMORMS3(.1)}


def make_model(names=LINKS):
    model = chainer.Chain(**{name: LINKS[name][0]() for name in names})
    if 'linear_none' in names:
        LINKS['linear_none'][1](model['linear_none'])  # sets its shape
    model.add_persistent('array', np.zeros(3, 'f'))
    model.add_persistent('number', 0.)
    return model


def fill(model):
    rng = np.random.RandomState(0)
    for _, param in sorted(model.namedparams()):
        param.data[...] = rng.uniform(-.7, .7, param.data.shape)
    for name in ('bn', 'bn_conv'):
        bn = model[name]
        bn.avg_mean[...] = rng.uniform(-.7, .7, bn.avg_mean.shape)
        bn.avg_var[...] = rng.uniform(.5, 1.5, bn.avg_var.shape)
    model.array, model.number = values(3), 2.5


def outputs(model, names=LINKS):
    """Return the output of each link, with train=True, then of BatchNormalization without."""
    found = {name: LINKS[name][1](model[name]).data for name in names}
    bn = model['bn']
    found['bn_avg_var'] = bn.avg_var
    if int(chainer.__version__.split('.')[0]) < 2:
        found['bn_test'] = bn(chainer.Variable(values(4, 3, step=.4)), test=True).data
    else:
        with chainer.using_config('train', False):
            found['bn_test'] = bn(values(4, 3, step=.4)).data
    return found


def make_optimizer(name, hooks=True):
    optimizer, model = OPTIMIZERS[name](), chainer.Chain(l=L.Linear(3, 2))
    optimizer.setup(model)
    if hooks:
        optimizer.add_hook(chainer.optimizer.WeightDecay(.01))
        optimizer.add_hook(chainer.optimizer.GradientClipping(1.))
    return optimizer, model


def update(optimizer, model, n=N_UPDATES):
    for _ in range(n):
        step = .3 * (optimizer.t + 1)
        for i, (_, param) in enumerate(sorted(model.namedparams())):
            param.grad = values(*param.data.shape, step=step + i)
        optimizer.update()


def parameters(model):
    return {name: param.data for name, param in model.namedparams()}


class Classifier(chainer.Chain):
    """With dropout neither here nor in old versions, for the same losses."""

    def __init__(self):
        super(Classifier, self).__init__(
            l1=L.Linear(3, 5), bn=L.BatchNormalization(5), l2=L.Linear(5, 3))

    def __call__(self, x, t):
        loss = F.softmax_cross_entropy(self.l2(F.relu(self.bn(self.l1(x)))), t)
        chainer.report({'loss': loss}, self)
        return loss


class Nowhere:
    """A stream that needs not be closed."""

    def write(self, text):
        pass

    def flush(self):
        pass


def make_trainer(out, saving=False):
    """Return a trainer, and the list to which it appends the loss of each iteration."""
    dataset = [(values(3, step=i + .5), np.array(i % 3, 'i')) for i in range(7)]
    model = Classifier()
    optimizer = optimizers.MomentumSGD(.2)
    optimizer.setup(model)
    iterator = chainer.iterators.SerialIterator(dataset, 2)
    trainer = training.Trainer(training.StandardUpdater(iterator, optimizer), (LENGTH, 'iteration'),
                               out=out)
    trainer.extend(extensions.ExponentialShift('lr', .5), trigger=(1, 'epoch'))
    trainer.extend(extensions.LogReport(trigger=(2, 'iteration')))
    validation = chainer.iterators.SerialIterator(dataset, 3, repeat=False, shuffle=False)
    trainer.extend(extensions.Evaluator(validation, model))
    trainer.extend(extensions.dump_graph('main/loss'))
    trainer.extend(extensions.PrintReport(['epoch', 'main/loss'], out=Nowhere()))
    trainer.extend(extensions.PlotReport(['main/loss'], trigger=(2, 'iteration')))
    trainer.extend(extensions.snapshot_object(model, 'best'),
                   trigger=training.triggers.MinValueTrigger('main/loss', (2, 'iteration')))
    losses = []

    @training.make_extension(trigger=(1, 'iteration'))
    def record(trainer):
        losses.append(float(trainer.observation['main/loss'].data))
        if trainer.updater.iteration == SAVED_AT:
            np.random.seed(1)  # as after loading

    trainer.extend(record)
    if saving:
        trainer.extend(extensions.snapshot(), trigger=(SAVED_AT, 'iteration'))
        if IS_PYTHON2:  # Python 3 cannot save a LogReport as HDF5
            trainer.extend(extensions.snapshot(serializers.save_hdf5, 'h5_{.updater.iteration}'),
                           trigger=(SAVED_AT, 'iteration'))
    return trainer, losses


def observe(trainer, losses):
    """Return what a resumed run must have in common with the old version's."""
    log = trainer.get_extension('LogReport').log
    updater = trainer.updater
    return {'losses': losses, 'iteration': updater.iteration, 'epoch': updater.epoch,
            'lr': updater.get_optimizer('main').lr, 't': updater.get_optimizer('main').t,
            'log_losses': [entry['main/loss'] for entry in log],
            'validation': [entry.get('validation/main/loss', 0.) for entry in log],
            'log_iterations': [entry['iteration'] for entry in log],
            'best': 'best' in os.listdir(trainer.out)}


def resume(path, load=serializers.load_npz):
    """Load a snapshot, then train to the end."""
    out = tempfile.mkdtemp()
    try:
        trainer, losses = make_trainer(out)
        load(path, trainer)
        np.random.seed(1)
        trainer.run()
        return observe(trainer, losses)
    finally:
        shutil.rmtree(out)


def write(folder):
    """Write the snapshots of this version, and the values that it computes with them."""
    out = tempfile.mkdtemp()

    def path(name):
        return os.path.join(out, name)

    model = make_model()
    fill(model)
    model.cleargrads()
    serializers.save_npz(path('model.npz'), model, compression=False)
    with open(path('model.pickle'), 'wb') as file:
        pickle.dump(model, file)
    reference = {'outputs/' + name: array for name, array in outputs(model).items()}
    for name in OPTIMIZERS:
        optimizer, model = make_optimizer(name)
        fill_values = np.random.RandomState(1)
        for _, param in sorted(model.namedparams()):
            param.data[...] = fill_values.uniform(-1, 1, param.data.shape)
        update(optimizer, model)
        for kind in ['npz', 'h5'] if name == 'adam' else ['npz']:
            save = serializers.save_npz if kind == 'npz' else serializers.save_hdf5
            save(path('%s_model.%s' % (name, kind)), model)
            save(path('%s.%s' % (name, kind)), optimizer)
        update(optimizer, model)
        for param, array in parameters(model).items():
            reference['updated/%s%s' % (name, param)] = array
    np.random.seed(0)
    trainer, losses = make_trainer(path('result'), saving=True)
    trainer.run()
    # Not a resumed run: in Chainer 1 and 2, triggers fired once more after resuming.
    for name, value in observe(trainer, losses[SAVED_AT:]).items():
        reference['trainer/' + name] = np.array(value)
    os.rename(path('result/snapshot_iter_%d' % SAVED_AT), path('trainer.npz'))
    if IS_PYTHON2:
        os.rename(path('result/h5_%d' % SAVED_AT), path('trainer.h5'))
    np.savez(path('reference.npz'), **reference)
    target = os.path.join(
        folder, chainer.__version__ + ('-python2.zip' if IS_PYTHON2 else '.zip'))
    with zipfile.ZipFile(target, 'w', zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(os.listdir(out)):
            if os.path.isfile(path(name)):
                archive.write(path(name), name)
    shutil.rmtree(out)


if __name__ == '__main__':
    warnings.simplefilter('ignore')
    write(sys.argv[1])
