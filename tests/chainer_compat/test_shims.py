"""Each shim is needed: Chainer works with it, and fails without it."""

import itertools
import pathlib
import sys
import warnings

import chainer
import pytest

from chainer_compat import _patch
from chainer_compat.shims import cupy_changes

pytestmark = pytest.mark.mpi_skip

IMPORT = 'import chainer'
WITHOUT_PKG_RESOURCES = 'import sys; sys.modules["pkg_resources"] = None\n'
# CuPy 14 by name only: enough for the shims that ask for its version.
CUPY_14 = '''
import sys, types
for name in ['cupy', 'cupy.cuda', 'cupy.cuda.nccl']:
    parent, _, child = name.rpartition('.')
    sys.modules[name] = types.ModuleType(name)
    if parent:
        setattr(sys.modules[parent], child, sys.modules[name])
sys.modules['cupy'].__version__ = '14.2.0'
sys.modules['cupy.cuda.nccl'].available = False
'''
# Hands out the CUDA code that a function would run, on NumPy arrays.
KERNEL = '''
import numpy
from chainer.backends import cuda
class Elementwise:
    def __init__(self, ins, outs, code, name, **options):
        kernels.append((code, options))
    def __call__(self, *args):
        pass
kernels = []
cuda.elementwise = Elementwise
cuda.cupy = numpy
'''
SNAPSHOT = '''
import pickle, types
from chainer.training import extensions
writer = extensions.snapshot_writers.{writer}()
extensions.snapshot(writer=writer, n_retains=1).initialize(types.SimpleNamespace(out='.'))
'''

SAVED = '''
import chainer, numpy, warnings
from chainer import serializers

def resume(saved, loaded):
    written = serializers.DictionarySerializer()
    saved.serialize(written)
    loaded.serialize(serializers.NpzDeserializer(written.target))
    return loaded
'''
TRAINER = SAVED + '''
def trainer(extension, stop, trigger=(1, 'iteration')):
    model = chainer.links.Linear(1, 1)
    def loss(x):
        chainer.report({'value': .5})
        return chainer.functions.sum(model(x))
    optimizer = chainer.optimizers.SGD(lr=.5).setup(model)
    updater = chainer.training.StandardUpdater(
        chainer.iterators.SerialIterator(numpy.ones((4, 1), 'f'), 1), optimizer, loss_func=loss)
    trainer = chainer.training.Trainer(updater, (stop, 'iteration'), out='.')
    trainer.extend(extension, name='extension', trigger=trigger)
    return trainer
'''
# Trains six updates, the last four of them with a resumed optimizer; the weights are the same.
RESUME = '''
import io, numpy
import chainer, chainer.functions as F, chainer.links as L
def weights(resumes, make, dtype='f'):
    def start():
        with chainer.using_config('dtype', numpy.dtype(dtype)):
            model = L.Linear(3, 2, initialW=1)
        return model, make().setup(model)
    model, optimizer = start()
    for i in range(6):
        if i == 2 and resumes:
            old, files = (model, optimizer), (io.BytesIO(), io.BytesIO())
            model, optimizer = start()
            for before, after, file in zip(old, (model, optimizer), files):
                chainer.serializers.save_npz(file, before)
                file.seek(0)
                chainer.serializers.load_npz(file, after)
        x = numpy.arange(i, i + 12, dtype=dtype).reshape(4, 3) / 7
        optimizer.update(lambda x: F.sum(model(x) ** 2), x)
    return model.W.array.tobytes()
'''

USES = {
    'state_of_msvag': RESUME + '''
assert weights(True, chainer.optimizers.MSVAG) == weights(False, chainer.optimizers.MSVAG)
''',
    'mixed_precision_states': RESUME + '''
def make():
    optimizer = chainer.optimizers.Adam(alpha=3e-4)
    setup = optimizer.setup
    def setup_mixed(model):
        setup(model)
        optimizer.use_fp32_update()
        optimizer.loss_scaling()
        return optimizer
    optimizer.setup = setup_mixed
    return optimizer
assert weights(True, make, 'e') == weights(False, make, 'e')
''',
    'sctypes': '''
import chainer.functions as F, numpy
x = chainer.Variable(numpy.arange(6, dtype='f'))
y = F.as_strided(x, (2, 2), (1, 2))
F.sum(y * y).backward()
assert x.grad.tolist() == [0, 2, 4, 6, 0, 0], x.grad
''',
    'distutils': IMPORT,
    'dependency_check': WITHOUT_PKG_RESOURCES + IMPORT,
    'requirements': WITHOUT_PKG_RESOURCES + '''
from chainer import testing
from chainer.testing import doctest_helper
assert not hasattr(testing.with_requires('numpy>=1.10')(type('T', (), {})), '__unittest_skip__')
assert testing.with_requires('numpy<1.10')(type('T', (), {})).__unittest_skip__
assert testing.without_requires('numpy>=1.10')(type('T', (), {})).__unittest_skip__
assert doctest_helper.skipif_requires_satisfied('numpy>=1.10')
assert not doctest_helper.skipif_requires_satisfied('no-such-thing')
''',
    'float_alias': '''
import chainer.functions as F, numpy
x = numpy.arange(4, dtype='f').reshape(1, 1, 2, 2)
for mode, align in [('bilinear', True), ('bilinear', False), ('nearest', False)]:
    y = F.resize_images(x, (4, 4), mode=mode, align_corners=align)
    assert (y.dtype, y.shape) == ('float32', (1, 1, 4, 4))
    assert y.array[0, 0, 0, 0] == 0 and y.array[0, 0, -1, -1] == 3
''',
    'meshgrid_tuple': '''
import chainer, numpy
p = numpy.array([[.2, .8], [.5, .5]], 'f')
for x in [numpy.array([1, 0]), chainer.Variable(numpy.array([1, 0]))]:
    y = chainer.distributions.Categorical(p).log_prob(x)
    numpy.testing.assert_allclose(y.array, numpy.log([.8, .5]), rtol=1e-6)
''',
    'negative_padding': '''
import chainer.functions as F, numpy
for dtype, padded in [('u1', 255), ('i4', -1), ('f4', -1.0), ('f2', -1.0)]:
    y = F.pad_sequence([numpy.ones(2, dtype), numpy.ones(1, dtype)], padding=-1)
    assert y.dtype == dtype
    assert y.array.tolist() == [[1, 1], [1, padded]]
    y = chainer.dataset.concat_examples([numpy.ones(2, dtype), numpy.ones(1, dtype)], padding=-1)
    assert y.dtype == dtype
    assert y.tolist() == [[1, 1], [1, padded]]
''',
    'third_argument_of_maximum': '''
import chainer, numpy
y = chainer.dataset.concat_examples([numpy.ones((1, 2)), numpy.ones((2, 1))], padding=0)
assert y.tolist() == [[[1, 1], [0, 0]], [[1, 0], [1, 0]]]
''',
    'fix': '''
import chainer.functions as F, numpy
assert F.fix(numpy.array([-1.5, -.5, .5, 1.5], 'f')).array.tolist() == [-1, 0, 0, 1]
''',
    'sparse_float16': '''
import chainer, chainer.functions as F, numpy
dense = numpy.array([[0, 1.5], [2, 0]], 'e')
for x in [numpy.ones((2, 3), 'e'), numpy.ones((2, 3), 'f')]:
    y = F.sparse_matmul(chainer.utils.to_coo(dense), x)
    assert y.dtype == x.dtype
    assert y.array.tolist() == dense.dot(x).tolist()
''',
    'caffe': '''
for module in ['chainer.links.caffe', 'chainer.exporters']:
    for _ in range(2):
        try:
            __import__(module)
        except ImportError as e:
            assert 'requires protobuf 3' in str(e)
''',
    'nccl_available': CUPY_14 + '''
from chainer.training.updaters import MultiprocessParallelUpdater
assert not MultiprocessParallelUpdater.available()
''',
    'float16_header': CUPY_14 + KERNEL + '''
from chainer.training.updaters import multiprocess_parallel_updater as updater
updater._memcpy_gather(), updater._memcpy_scatter()
for code, options in kernels:
    assert options['preamble'] == '#include <cupy/float16.cuh>\\n'
''',
    'atomic_add_of_float16': CUPY_14 + KERNEL + '''
from chainer.functions.array import resize_images
from chainer.links.loss import hierarchical_softmax
x = numpy.zeros((1, 1, 2, 2), 'e')
resize_images.interpolate_grad_bilinear_gpu(x, 0, 0, 0, 0, 2, 2)
function = object.__new__(hierarchical_softmax.BinaryHierarchicalSoftmaxFunction)
function.wxy = function.paths = function.codes = function.begins = function.max_length = None
function.backward_gpu((x[0, 0], x, x), (x,))
from chainer.functions.loss.negative_sampling import NegativeSamplingFunctionGrad
NegativeSamplingFunctionGrad('sum', x, 1, None, x).forward_gpu((x[0, 0], x[0, 0], x))
adding = [code for code, _ in kernels if 'atomicAdd' in code]
assert len(adding) == 3
for code in adding:
    assert code.count('atomicAdd') == code.count(', (T)(')
''',
    'set_daemon': '''
import chainer, warnings
# The iterator forks from a thread, of which Python >= 3.12 warns, rightly.
warnings.filterwarnings('ignore', '.* multi-threaded, use of fork', DeprecationWarning)
iterator = chainer.iterators.MultiprocessIterator([1, 2, 3], 2, shuffle=False, n_processes=1)
assert iterator.next() == [1, 2]
iterator.finalize()
''',
    'stop_iteration_in_example': '''
import chainer
class Stopping(chainer.dataset.DatasetMixin):
    def __len__(self):
        return 4
    def get_example(self, i):
        if i == 1:
            raise StopIteration
        return i
for kind in chainer.iterators.SerialIterator, chainer.iterators.MultithreadIterator:
    with kind(Stopping(), 2, shuffle=False) as iterator:
        try:
            iterator.next()
        except RuntimeError as error:
            assert 'example 1 of the data set (Stopping) raised StopIteration' in str(error)
''',
    'error_in_first_batch': '''
import chainer, threading
threading.excepthook = lambda args: None
class Failing(chainer.dataset.DatasetMixin):
    def __len__(self):
        return 4
    def get_example(self, i):
        raise ValueError(i)
with chainer.iterators.MultiprocessIterator(Failing(), 2, shuffle=False, n_processes=1) as iterator:
    try:
        iterator.next()
    except ValueError as error:
        assert error.args == (0,)
''',
    'error_in_later_batch': '''
import chainer, threading, warnings
warnings.filterwarnings('ignore', '.* multi-threaded, use of fork', DeprecationWarning)
threading.excepthook = lambda args: None
class Failing(chainer.dataset.DatasetMixin):
    def __len__(self):
        return 4
    def get_example(self, i):
        if i == 3:
            raise ValueError(i)
        return i
with chainer.iterators.MultiprocessIterator(
        Failing(), 2, shuffle=False, n_processes=1, dataset_timeout=2) as iterator:
    assert iterator.next() == [0, 1]
    try:
        iterator.next()
    except ValueError as error:
        assert error.args == (3,)
''',
    'iterators_at_exit': '''
import atexit, os, sys, warnings
warnings.filterwarnings('ignore', '.* multi-threaded, use of fork', DeprecationWarning)
def check():
    if not iterator._finalized:
        print('Traceback: it was not finalized', file=sys.stderr, flush=True)
        os._exit(1)
atexit.register(check)  # before Chainer is imported, so that it runs last
import chainer
iterator = chainer.iterators.MultiprocessIterator([1, 2, 3, 4], 2, n_processes=1)
iterator.next()
''',
    'dead_worker': '''
import chainer, os, warnings
warnings.filterwarnings('ignore', '.* multi-threaded, use of fork', DeprecationWarning)
class Deadly(chainer.dataset.DatasetMixin):
    def __len__(self):
        return 4
    def get_example(self, i):
        os.kill(os.getpid(), 9) if i == 3 else None
        return i
iterator = chainer.iterators.MultiprocessIterator(Deadly(), 2, shuffle=False, n_processes=1)
assert iterator.next() == [0, 1]
try:
    iterator.next()
except RuntimeError as error:
    assert 'died with exit code -9; its batch is lost' in str(error)
''',
    'fork_by_default': '''
from chainer.training.extensions import snapshot_writers
import multiprocessing
assert snapshot_writers.multiprocessing.get_start_method() == 'fork'
multiprocessing.set_start_method('spawn', force=True)
assert snapshot_writers.multiprocessing.get_start_method() == 'spawn'
''',
    'picklable_cleanup': SNAPSHOT.format(writer='ProcessWriter') + '''
assert len(pickle.loads(pickle.dumps(writer))._post_save_hooks) == 1
''',
    'picklable_writers': SNAPSHOT.format(writer='ProcessWriter') + '''
writer._worker = open('snapshot', 'w')
pickle.dumps(writer)
''',
    'cleanup_of_queues': SNAPSHOT.format(writer='ThreadQueueWriter') + '''
writer.finalize()
assert len(writer._task._post_save_hooks) == 1
''',
    'large_columns': KERNEL + '''
from chainer.utils import conv, conv_nd
class Array(numpy.ndarray):
    def reduced_view(self):
        return self
x = numpy.ones((1, 1, 3, 3), 'f').view(Array)
col = numpy.ones((1, 1, 1, 1, 3, 3), 'f').view(Array)
conv.im2col_gpu(x, 1, 1, 1, 1, 0, 0)
conv.col2im_gpu(col, 1, 1, 0, 0, 3, 3)
conv_nd.im2col_nd_gpu(x, (1, 1), (1, 1), (0, 0))
conv_nd.col2im_nd_gpu(col, (1, 1), (0, 0), (3, 3))
assert len(kernels) == 4
for code, _ in kernels:
    assert 'ptrdiff_t c0 = ' in code
''',
    'lazy_scipy': '''
import chainer, numpy, sys
assert not [name for name in sys.modules if name.startswith('scipy')]
x = numpy.array([.5], 'f')
assert chainer.functions.erfcinv(x).array.dtype == 'f'
assert chainer.functions.erfinv(x).array.dtype == 'f'
assert chainer.functions.erfcx(x).array.dtype == 'f'
assert chainer.functions.ndtri(x).array.dtype == 'f'
assert chainer.datasets.svhn.io.loadmat is sys.modules['scipy.io'].loadmat
Normal = chainer.distributions.MultivariateNormal
normal = Normal(numpy.zeros(2, 'f'), scale_tril=numpy.eye(2, dtype='f'))
assert numpy.isfinite(normal.log_prob(numpy.ones(2, 'f')).array)
''',
    'deconvolution_cover_all': '''
import chainer, chainer.functions as F, numpy
x = numpy.ones((1, 1, 2, 2), 'f')
W = chainer.Variable(numpy.ones((1, 1, 2, 2), 'f'))
F.sum(F.deconvolution_2d(x, W)).backward()
assert W.grad.tolist() == [[[[4, 4], [4, 4]]]]
''',
    'dtype_of_clip': KERNEL + '''
from chainer.functions.math.clip import Clip
clip = Clip(numpy.zeros(1, 'f'), numpy.ones(1, 'f'))
assert clip.forward_gpu((numpy.ones(2, 'e'),))[0].dtype == 'e'
''',
    'scatter_add': CUPY_14 + KERNEL + '''
from chainer import backend
from chainer.functions.array.get_item import GetItemGrad
backend.get_array_module = lambda *arrays: types.SimpleNamespace(zeros=numpy.zeros)
assert GetItemGrad((1,), (3,)).forward((numpy.ones((), 'f'),))[0].tolist() == [0, 1, 0]
''',
    'geometric_of_float16': CUPY_14 + KERNEL + '''
import chainer
geometric = chainer.distributions.Geometric(numpy.ones(2, 'e'))
def sample(p, size):
    return numpy.ones(size, 'l')
cuda.cupy = types.SimpleNamespace(random=types.SimpleNamespace(geometric=sample))
chainer.backend.get_array_module = lambda *arrays: cuda.cupy
assert geometric.sample_n(3).dtype == 'e'
''',
    'msvag_of_float16': '''
import chainer, numpy
param = chainer.Parameter(numpy.ones(9, 'e'))
param.grad = numpy.linspace(1, 9, 9, dtype='e')
rule = chainer.optimizers.MSVAG(lr=.1).create_update_rule()
rule.update(param)
numpy.testing.assert_allclose(param.array, 1 - .1 * numpy.linspace(1, 9, 9), atol=1e-3)
assert rule.state['m'].dtype == rule.state['v'].dtype == 'e'
''',
    'clipping_of_zeros': '''
import chainer, numpy, warnings
warnings.simplefilter('error')
link = chainer.Link()
with link.init_scope():
    link.w = chainer.Parameter(numpy.ones(3, 'f'))
optimizer = chainer.optimizers.SGD().setup(link)
optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(1))
link.w.grad = numpy.zeros(3, 'f')
optimizer.update()
assert (link.w.array == 1).all()
''',
    'summary_state': SAVED + '''
summary = chainer.reporter.Summary()
summary.add(numpy.float32(.1), weight=1.5)
loaded = resume(summary, chainer.reporter.Summary())
assert loaded.compute_mean() == summary.compute_mean()
''',
    'early_stopping_state': SAVED + '''
from chainer.training.triggers import EarlyStoppingTrigger
trigger = EarlyStoppingTrigger()
trigger.count, trigger.best = 2, .5
loaded = resume(trigger, EarlyStoppingTrigger())
assert (loaded.count, loaded.best) == (2, .5)
''',
    'micro_average_state': SAVED + '''
from chainer.training.extensions import MicroAverage
average = MicroAverage('a', 'b', 'c')
average._numerator = .5
assert resume(average, MicroAverage('a', 'b', 'c'))._numerator == .5
''',
    'plot_report_state': SAVED + '''
from chainer.training.extensions import PlotReport
plot = PlotReport(['a'])
plot._summary.add({'a': .5})
assert resume(plot, PlotReport(['a']))._summary.compute_mean() == {'a': .5}
''',
    'parameter_statistics_state': SAVED + '''
from chainer.training.extensions import ParameterStatistics
statistics = ParameterStatistics(chainer.links.Linear(1, 1))
statistics._summary.add({'a': .5})
loaded = resume(statistics, ParameterStatistics(chainer.links.Linear(1, 1)))
assert loaded._summary.compute_mean() == {'a': .5}
''',
    'parameter_without_gradient': '''
import chainer
from chainer.training.extensions import ParameterStatistics
link = chainer.links.Linear(None, 1)  # W has no data yet
link.cleargrads()
statistics = ParameterStatistics(link, {'max': lambda x: x.max()}, trigger=lambda trainer: True)
reporter = chainer.Reporter()
with reporter:
    statistics(None)
assert reporter.observation == {'None/b/data/max': 0}
''',
    'variable_statistics_state': SAVED + '''
from chainer.training.extensions import VariableStatisticsPlot
plots = [VariableStatisticsPlot(chainer.links.Linear(1, 1)) for _ in range(2)]
plots[0]._samples.add(numpy.full(plots[0]._data_shape, .5), 3)
indices, data = resume(*plots)._samples.get_data()
assert indices.tolist() == [3] and (data == .5).all()
''',
    'shift_state': TRAINER + '''
from chainer.training.extensions import WarmupShift
first, second = trainer(WarmupShift('lr', 0., 2, 1.), 3), trainer(WarmupShift('lr', 0., 2, 1.), 3)
first.run()
resume(first, second).run()
assert second.updater.get_optimizer('main').lr == 1.
''',
    'finished_shift': TRAINER + '''
from chainer.training.extensions import ExponentialShift
from chainer.training.triggers import ManualScheduleTrigger
first, second = [trainer(ExponentialShift('lr', .5), 3, ManualScheduleTrigger(2, 'iteration'))
                 for _ in range(2)]
first.run()
resume(first, second).run()
assert second.updater.get_optimizer('main').lr == .25
''',
    'autoload_first': TRAINER + '''
from chainer.training.extensions import ExponentialShift, snapshot
rates = []
for stop in (4, 6):
    one = trainer(ExponentialShift('lr', .5), stop, (3, 'iteration'))
    one.extend(snapshot(autoload=True), trigger=(4, 'iteration'))
    one.extend(lambda trainer: rates.append(trainer.updater.get_optimizer('main').lr),
               name='rates', trigger=(1, 'iteration'))
    one.run()
assert rates == [.5, .5, .25, .25, .25, .125]
''',
    'observation_state': TRAINER + '''
first, second = trainer(lambda trainer: None, 2), trainer(lambda trainer: None, 2)
first.run()
assert resume(first, second).observation['value'] == .5
''',
    'prefetched_orders': SAVED + '''
iterator = chainer.iterators.MultithreadIterator(range(9), 4)
plain = chainer.iterators.MultithreadIterator(range(9), 4)
iterator.next(), iterator.next()
resume(iterator, plain)
assert iterator.next() == plain.next()
iterator.finalize(), plain.finalize()

class InPlace(chainer.iterators.ShuffleOrderSampler):
    def __call__(self, order, position):
        numpy.random.shuffle(order)
        return order

iterator = chainer.iterators.MultithreadIterator(range(4), 3, order_sampler=InPlace())
iterator.next()
resume(iterator, iterator).finalize()
''',
    'iterator_without_order': SAVED + '''
iterator = chainer.iterators.MultiprocessIterator(range(9), 4, shuffle=False)
resume(iterator, iterator)
''',
    'samples_of_this_rank': '''
import warnings, numpy, chainer
from chainer.functions.normalization import batch_normalization as bn
x, gamma, beta = numpy.ones((1, 2), 'f'), numpy.ones(2, 'f'), numpy.zeros(2, 'f')
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    chainer.functions.batch_normalization(x, gamma, beta)
assert 'no more than one sample' in str(caught[0].message)
implementation = bn.GeneralBatchNormalizationImpl()
bn.BatchNormalization(impl_selector=lambda *_: implementation).apply((x, gamma, beta))
''',
    'invalid_types': '''
import numpy, chainer
import chainer.functions as F
x = numpy.ones((2, 3), 'f')
for function, args in [(F.softmax, (x[0],)), (F.log_softmax, (x[0],)),
                       (F.softmax_cross_entropy, (x, numpy.zeros(3, 'i')))]:
    try:
        function(*args)
    except chainer.utils.type_check.InvalidType:
        pass
    else:
        raise AssertionError(function)
''',
    'evaluator_without_iterator': '''
import chainer
class Iterator(chainer.dataset.Iterator):
    finalized = 0
    def finalize(self):
        self.finalized += 1
other = Iterator()
target = chainer.links.Linear(1, 1)
chainer.training.extensions.Evaluator({'main': None, 'other': other}, target).finalize()
assert other.finalized == 1
''',
    'progress_bar_arguments': '''
import chainer, io
from chainer import training
from chainer.training import extensions
model = chainer.links.Linear(1, 1)
iterator = chainer.iterators.SerialIterator([0], 1)
updater = training.StandardUpdater(iterator, chainer.optimizers.SGD().setup(model))
updater.iteration = 5
trainer = training.Trainer(updater, lambda trainer: True)  # a trigger of unknown length
bar = io.StringIO()
extensions.ProgressBar((20, 'iteration'), 1, bar_length=8, out=bar)(trainer)
assert 'total [##......] 25.00%' in bar.getvalue()
''',
    'scalar_options': '''
import chainer.functions as F, numpy
x = numpy.ones((2, 3), 'e')
assert F.layer_normalization(x, x[0], x[0], numpy.float32(1e-3)).dtype == 'e'
assert F.clipped_relu(x, numpy.float32(.5)).array.tolist() == [[.5] * 3] * 2
''',
    'scalar_hyperparameters': '''
import chainer, numpy
optimizer = chainer.optimizers.SMORMS3(lr=numpy.float64(.1), eps=numpy.array(1e-8))
assert (type(optimizer.lr), optimizer.lr, type(optimizer.eps)) == (float, .1, float)
optimizer.lr = numpy.float32(.5)
assert type(optimizer.hyperparam.lr) is float
''',
    'use_torch': '''
import chainer
assert chainer.config.use_torch == 'auto'
''',
    'torch_kernels': '''
import chainer, numpy
from chainer.functions.connection.convolution_2d import Convolution2DFunction
assert Convolution2DFunction._forward_cpu_core.__wrapped__
assert chainer.functions.relu(numpy.ones(1)).array == 1
''',
    'updates_in_blocks': '''
import chainer, numpy, tracemalloc
link = chainer.links.Linear(1000, 1000)
optimizer = chainer.optimizers.Adam().setup(link)
for param in link.params():
    param.grad = numpy.ones_like(param.array)
optimizer.update()
tracemalloc.start()
optimizer.update()
assert tracemalloc.get_traced_memory()[1] < link.W.array.nbytes / 2
''',
    'removed_aliases': '''
import chainer, numpy
try:
    numpy.float
except AttributeError as e:
    assert str(e).splitlines()[-1].startswith('CHAINER_COMPAT_NUMPY_ALIASES=1 restores')
''',
}

# What tests that the modules of a shim behave, besides USES. A new shim needs a line here.
RESUMED = '../extensions/test_resumed_logs.py'

TESTS = {
    'atomic_add_of_float16': ['shims/test_cupy_changes.py::test_binary_hierarchical_softmax',
                              'shims/test_numpy_changes.py::test_resize_images',
                              'shims/test_cupy_changes.py::test_negative_sampling',
                              'test_kernels.py::test_patched_kernels_compile',
                              '../gpu/test_chainer_on_gpu.py::test_binary_hierarchical_softmax',
                              '../gpu/test_chainer_on_gpu.py::test_negative_sampling'],
    'caffe': ['test_left_out.py::test_caffe'],
    'cudnn_warning': ['test_shims.py::test_cudnn_warning'],
    'deconvolution_cover_all': ['shims/test_chainer_bugs.py::test_deconvolution_2d'],
    'dependency_check': ['test_patch.py::test_import_without_setuptools'],
    'distutils': ['test_patch.py::test_import_is_silent_and_leaves_no_trace'],
    'fix': ['shims/test_numpy_changes.py::test_fix',
            'shims/test_numpy_changes.py::test_fmod'],
    'float16_header': ['test_kernels.py::test_patched_kernels_compile'],
    'float_alias': ['shims/test_numpy_changes.py::test_resize_images'],
    'large_columns': ['shims/test_large_columns.py::test_im2col',
                      'shims/test_large_columns.py::test_col2im',
                      'test_kernels.py::test_patched_kernels_compile',
                      '../gpu/test_chainer_on_gpu.py::test_large_columns'],
    'meshgrid_tuple': ['shims/test_numpy_changes.py::test_categorical'],
    'mixed_precision_states': [
        'shims/test_optimizer_states.py::test_float32_copies_of_the_loaded_parameters',
        'shims/test_optimizer_states.py::test_dynamic_loss_scale'],
    'nccl_available': ['test_left_out.py::test_parallel_updaters'],
    'negative_padding': ['shims/test_numpy_changes.py::test_pad_sequence',
                         'shims/test_numpy_changes.py::test_concat_examples'],
    'requirements': ['test_requirements.py::test_met', 'test_requirements.py::test_conflict'],
    'lazy_scipy': ['shims/test_scipy_changes.py::test_sparse_matmul'],
    'sctypes': ['shims/test_numpy_changes.py::test_as_strided'],
    'set_daemon': ['test_iterators.py::test_start_methods'],
    'sparse_float16': ['shims/test_scipy_changes.py::test_sparse_matmul'],
    'state_of_msvag': [
        'shims/test_optimizer_states.py::test_snapshots_of_msvag_without_the_power'],
    'third_argument_of_maximum': ['shims/test_numpy_changes.py::test_concat_examples'],
    'cleanup_of_queues': ['test_start_method.py::test_snapshots_with_forkserver'],
    'fork_by_default': ['test_start_method.py::test_a_script_without_main_guard'],
    'picklable_cleanup': ['test_start_method.py::test_snapshots_with_forkserver'],
    'picklable_writers': ['test_start_method.py::test_snapshots_with_forkserver'],
    'dead_worker': ['test_iterators.py::test_a_worker_that_is_killed'],
    'stop_iteration_in_example': ['test_iterators.py::test_errors_in_examples'],
    'error_in_first_batch': ['test_iterators.py::test_errors_in_examples'],
    'error_in_later_batch': ['test_iterators.py::test_errors_in_examples'],
    'iterators_at_exit': ['test_iterators.py::test_global_iterators_at_exit'],
    'invalid_types': ['test_every_function.py::test_errors_of_wrong_inputs'],
    'dtype_of_clip': ['../gpu/test_devices_agree_on_gpu.py::test_bounds_of_clip'],
    'scatter_add': ['../gpu/test_devices_agree_on_gpu.py::test_function'],
    'geometric_of_float16': ['../gpu/test_devices_agree_on_gpu.py::test_samples_of_a_distribution'],
    'msvag_of_float16': ['../gpu/test_devices_agree_on_gpu.py::test_optimizer'],
    'clipping_of_zeros': ['../optimizers/test_compression.py::'
                          'test_clipping_of_gradients_that_were_not_sent_yet'],
    'summary_state': [RESUMED + '::test_every_extension_and_trigger'],
    'micro_average_state': [RESUMED + '::test_every_extension_and_trigger'],
    'plot_report_state': [RESUMED + '::test_every_extension_and_trigger'],
    'parameter_statistics_state': [RESUMED + '::test_every_extension_and_trigger'],
    'parameter_without_gradient': [
        '../extensions/test_parameter_statistics.py::test_accumulated_gradients'],
    'variable_statistics_state': [RESUMED + '::test_every_extension_and_trigger'],
    'shift_state': [RESUMED + '::test_every_extension_and_trigger'],
    'finished_shift': [RESUMED + '::test_every_extension_and_trigger'],
    'autoload_first': ['../extensions/test__multi_node_snapshot.py::'
                       'test_autoload_before_other_extensions_start'],
    'early_stopping_state': [RESUMED + '::test_every_stop_trigger'],
    'observation_state': [RESUMED + '::test_every_stop_trigger'],
    'prefetched_orders': [RESUMED + '::test_every_iterator'],
    'iterator_without_order': [RESUMED + '::test_every_iterator'],
    'samples_of_this_rank': [
        '../links/test_batch_normalization_at_random.py::test_random_batches'],
    'evaluator_without_iterator': ['test_training.py::test_evaluator_and_statistics'],
    'progress_bar_arguments': ['test_training.py::test_log_print_and_progress_bar'],
    'torch_kernels': ['torch_kernels/test_functions.py::test_convolution_2d',
                      'torch_kernels/test_n_step_rnn.py::test_values_and_gradients',
                      'torch_kernels/test_control.py::test_import_and_fork'],
    'use_torch': ['torch_kernels/test_control.py::test_values_of_the_options',
                  'torch_kernels/test_control.py::test_the_configuration'],
    'updates_in_blocks': ['shims/test_optimizer_updates.py::test_the_same_bits'],
    'removed_aliases': ['test_numpy_aliases.py::test_error'],
    'scalar_hyperparameters': ['test_scalar_options.py::test_optimizers'],
    'scalar_options': ['test_every_function.py::test_options_can_be_numpy_scalars'],
}

FORGET = '''
from chainer_compat import _patch, shims
for table in (_patch.edits, _patch.patches):
    for names in table.values():
        names[:] = [shim for shim in names if shim.__name__ != {name!r}]
'''


def test_every_shim_is_here():
    names = {shim.__name__ for shim in _patch.find_shims()}
    assert names == {*USES, 'cudnn_warning'}
    assert names == set(TESTS)


@pytest.mark.parametrize('test', sorted(set(itertools.chain(*TESTS.values()))))
def test_the_test_of_a_shim_is_there(test):
    file, _, name = test.partition('::')
    text = pathlib.Path(__file__).parent.joinpath(file).read_text(encoding='utf-8')
    assert f'\ndef {name}(' in text


@pytest.mark.sample(4)
@pytest.mark.parametrize('name', USES)
def test_with(python, name):
    python(f'import chainer\n{USES[name]}' if 'sys' not in USES[name] else USES[name])


@pytest.mark.sample(4)
@pytest.mark.parametrize('name', [
    # Without its shim, this one waits for long.
    pytest.param(name, marks=pytest.mark.full if name == 'dead_worker' else ()) for name in USES])
def test_fails_without(python, name):
    shim = next(shim for shim in _patch.find_shims() if shim.__name__ == name)
    if not _patch.is_active(shim) and 'cupy' not in shim.__module__:
        pytest.skip('The versions here do not need it')
    said = python(FORGET.format(name=name) + USES[name], check=False)
    assert said.startswith('1 Traceback'), said


def test_cudnn_warning(monkeypatch):
    cuda = chainer.backends.cuda
    check = cuda.check_cuda_available
    for name, value in dict(available=True, cudnn_enabled=False,
                            _cudnn_disabled_by_user=False).items():
        monkeypatch.setattr(cuda, name, value, raising=False)
    monkeypatch.setattr(check, '_already_warned', False, raising=False)
    with pytest.warns(UserWarning, match='cuDNN is not enabled'):
        check()
    monkeypatch.setattr(check, '_already_warned', False)
    monkeypatch.setitem(sys.modules, 'cupy', type(sys)('cupy'))
    sys.modules['cupy'].__version__ = '14.2.0'
    cupy_changes.cudnn_warning(cuda)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        check()
