"""Each shim is needed: Chainer works with it, and fails without it.

A test of TESTS fails without its shim, or if there is none that can, a program of USES.
"""

import itertools
import pathlib
import sys
import warnings

import chainer
import pytest
from each_case import each_case

from chainer_compat.fixes import cupy_changes
from chainer_compat.patching import registry

pytestmark = pytest.mark.mpi_skip

FOLDER = pathlib.Path(__file__).parent
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

USES = {
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
    'gradients_without_variables': '''
import chainer, numpy
x = chainer.Variable(numpy.array(3, 'f'))
loss = chainer.functions.exp((x * x) / 9)
loss.backward(retain_grad=True)
node = loss.creator.inputs[0]
assert node.grad == node.grad_var.array == loss.array
assert node.creator.inputs[0].grad == loss.array / numpy.float32(9)
assert x.node.grad == x.grad
''',
    'alias_table': '''
from chainer.utils import WalkerAlias
assert WalkerAlias([1, 2, 3]).values.tolist() == [0, 1, 1, 2, 2, 0]  # as in Chainer 1.24 and 3.5
''',
    'zerograd_of_read_only': '''
import chainer, numpy, warnings
x = chainer.Variable(numpy.ones(3, 'f'))
chainer.functions.sum(x).backward()
warnings.simplefilter('ignore')
x.zerograd()
assert x.grad.tolist() == [0, 0, 0] and x.grad.flags.writeable
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
    'use_torch': '''
import chainer
assert chainer.config.use_torch == 'auto'
''',
    'torch_compute_dtype': '''
import chainer
assert chainer.config.torch_compute_dtype is None
''',
    'torch_kernels': '''
import chainer, numpy
from chainer.functions.connection.convolution_2d import Convolution2DFunction
assert Convolution2DFunction._forward_cpu_core.__wrapped__
assert chainer.functions.relu(numpy.ones(1)).array == 1
''',
}

# What tests that the modules of a shim behave. A new shim needs a line here, and a program in USES
# if these tests need a GPU, pass without it, or start processes otherwise than by ``python``.
RESUMED = '../extensions/test_resumed_logs.py'
OLD_ATTRIBUTES = 'dialect/test_old_attributes.py::'
OLD_SNAPSHOTS = 'dialect/old_snapshots/test_old_snapshots.py::'

TESTS = {
    'atomic_add_of_float16': ['fixes/test_cupy_changes.py::test_binary_hierarchical_softmax',
                              'fixes/test_numpy_changes.py::test_resize_images',
                              'fixes/test_cupy_changes.py::test_negative_sampling',
                              'test_kernels.py::test_patched_kernels_compile',
                              '../gpu/test_chainer_on_gpu.py::test_binary_hierarchical_softmax',
                              '../gpu/test_chainer_on_gpu.py::test_negative_sampling'],
    'caffe': ['test_left_out.py::test_caffe'],
    'cudnn_warning': ['test_shims.py::test_cudnn_warning'],
    'deconvolution_cover_all': ['fixes/test_chainer_bugs.py::test_deconvolution_2d'],
    'update_before_setup': ['fixes/test_chainer_bugs.py::test_update_before_setup'],
    'metaclass_of_links': ['fixes/test_chainer_bugs.py::test_a_model_of_a_script_in_cloudpickle'],
    'setup_of_something_else': ['fixes/test_chainer_bugs.py::test_setup_of_something_else'],
    'unused_sequences': ['fixes/test_chainer_bugs.py::test_transpose_sequence'],
    'no_ids': ['fixes/test_chainer_bugs.py::test_no_ids'],
    'rate_before_the_first_update': [
        'fixes/test_chainer_bugs.py::test_the_rate_of_adam_before_the_first_update'],
    'states_before_the_first_update': [
        'fixes/test_optimizer_states.py::test_snapshots_before_the_first_update'],
    'examples_of_zipped_images': ['fixes/test_chainer_bugs.py::test_zipped_images'],
    'dependency_check': ['patching/test_loader.py::test_import_without_setuptools'],
    'distutils': ['patching/test_loader.py::test_import_is_silent_and_leaves_no_trace'],
    'fix': ['test_every_function.py::test_same_as_in_numpy'],
    'float16_header': ['test_kernels.py::test_patched_kernels_compile'],
    'float_alias': ['fixes/test_numpy_changes.py::test_resize_images'],
    'large_columns': ['fixes/test_large_columns.py::test_im2col',
                      'fixes/test_large_columns.py::test_col2im',
                      'test_kernels.py::test_patched_kernels_compile',
                      '../gpu/test_chainer_on_gpu.py::test_large_columns'],
    'meshgrid_tuple': ['fixes/test_numpy_changes.py::test_categorical'],
    'mixed_precision_states': [
        'fixes/test_optimizer_states.py::test_float32_copies_of_the_loaded_parameters',
        'fixes/test_optimizer_states.py::test_dynamic_loss_scale'],
    'nccl_available': ['test_left_out.py::test_parallel_updaters'],
    'negative_padding': ['fixes/test_numpy_changes.py::test_pad_sequence',
                         'fixes/test_numpy_changes.py::test_concat_examples'],
    'requirements': ['fixes/test_requirements.py::test_met',
                     'fixes/test_requirements.py::test_conflict'],
    'lazy_scipy': ['fixes/test_scipy_changes.py::test_sparse_matmul'],
    'sctypes': ['fixes/test_numpy_changes.py::test_as_strided'],
    'set_daemon': ['fixes/test_iterators.py::test_start_methods'],
    'sparse_float16': ['fixes/test_scipy_changes.py::test_sparse_matmul'],
    'state_of_msvag': [
        'fixes/test_optimizer_states.py::test_snapshots_of_msvag_without_the_power'],
    'third_argument_of_maximum': ['fixes/test_numpy_changes.py::test_concat_examples'],
    'cleanup_of_queues': ['fixes/test_start_method.py::test_snapshots_with_forkserver'],
    'sums_of_observed_numbers': ['fixes/test_numpy_changes.py::test_means_of_observed_numbers'],
    'sums_of_micro_average': ['fixes/test_numpy_changes.py::test_means_of_observed_numbers'],
    'norm_of_all_gradients': [
        'fixes/test_chainer_bugs.py::test_clipping_by_the_norm_of_all_gradients'],
    'rate_of_lars': ['fixes/test_chainer_bugs.py::test_rate_of_lars'],
    'copies_for_writers': ['fixes/test_chainer_bugs.py::test_a_snapshot_written_later',
                           'fixes/test_chainer_bugs.py::test_a_snapshot_of_the_queue_of_a_process'],
    'fork_by_default': ['fixes/test_start_method.py::test_choices_of_the_program'],
    'picklable_cleanup': ['fixes/test_start_method.py::test_snapshots_with_forkserver'],
    'picklable_writers': ['fixes/test_start_method.py::test_snapshots_with_forkserver'],
    'dead_worker': ['fixes/test_iterators.py::test_a_worker_that_is_killed'],
    'stop_iteration_in_example': ['fixes/test_iterators.py::test_errors_in_examples'],
    'empty_batches': ['fixes/test_iterators.py::test_batch_sizes'],
    'empty_datasets': ['fixes/test_iterators.py::test_empty_datasets'],
    'progress_of_empty_datasets': ['fixes/test_iterators.py::test_empty_datasets'],
    'error_in_first_batch': ['fixes/test_iterators.py::test_errors_in_examples'],
    'error_in_later_batch': ['fixes/test_iterators.py::test_errors_in_examples'],
    'iterators_at_exit': ['fixes/test_iterators.py::test_global_iterators_at_exit'],
    'invalid_types': ['test_every_function.py::test_in_float32'],
    'dtype_of_clip': ['../gpu/test_devices_agree_on_gpu.py::test_bounds_of_clip'],
    'scatter_add': ['../gpu/test_devices_agree_on_gpu.py::test_function'],
    'geometric_of_float16': ['../gpu/test_devices_agree_on_gpu.py::test_samples_of_a_distribution'],
    'msvag_of_float16': ['../gpu/test_devices_agree_on_gpu.py::test_optimizer'],
    'clipping_of_zeros': ['../optimizers/test_compression.py::'
                          'test_clipping_of_gradients_that_were_not_sent_yet'],
    'summary_state': [RESUMED + '::test_a_summary_of_weighted_values'],
    'micro_average_state': [RESUMED + '::test_every_extension_and_trigger'],
    'plot_report_state': [RESUMED + '::test_every_extension_and_trigger'],
    'parameter_statistics_state': [RESUMED + '::test_every_extension_and_trigger'],
    'parameter_without_gradient': [
        '../extensions/test_parameter_statistics.py::test_accumulated_gradients'],
    'variable_statistics_state': [RESUMED + '::test_every_extension_and_trigger'],
    'best_value_without_values': [RESUMED + '::test_every_extension_and_trigger'],
    'gradients_without_variables': ['dialect/old_programs/test_old_programs.py::test_losses'],
    'alias_table': ['dialect/old_programs/test_old_programs.py::test_losses'],
    'zerograd_of_read_only': ['dialect/old_programs/test_old_programs.py::test_losses'],
    'shift_state': [RESUMED + '::test_every_extension_and_trigger'],
    'finished_shift': [RESUMED + '::test_every_extension_and_trigger'],
    'autoload_first': ['../extensions/test__multi_node_snapshot.py::'
                       'test_autoload_before_other_extensions_start'],
    'early_stopping_state': [RESUMED + '::test_every_stop_trigger'],
    'observation_state': [RESUMED + '::test_every_stop_trigger'],
    'prefetched_orders': [RESUMED + '::test_every_iterator'],
    'iterator_without_order': [RESUMED + '::test_every_iterator'],
    'samples_of_this_rank': [
        '../laws/test_batch_normalization.py::test_batch_normalization'],
    'evaluator_that_repeats': [
        'fixes/test_chainer_bugs.py::test_the_warning_about_an_evaluator_that_repeats'],
    'evaluator_without_iterator': ['test_training.py::test_evaluator_and_statistics'],
    'regions_outside_of_the_image': [
        'fixes/test_chainer_bugs.py::test_regions_of_interest_outside_of_the_image'],
    'coordinates_of_regions': ['fixes/test_numpy_changes.py::test_coordinates_of_regions'],
    'progress_bar_arguments': ['test_training.py::test_log_print_and_progress_bar'],
    'torch_kernels': ['pytorch/test_functions.py::test_values_and_gradients',
                      'pytorch/test_n_step_rnn.py::test_values_and_gradients',
                      'pytorch/test_control.py::test_import_and_fork'],
    'images_with_channels_last': [
        'pytorch/test_memory_format.py::test_dropout_draws_the_same_numbers',
        'pytorch/test_memory_format.py::test_sums_and_means'],
    'use_torch': ['pytorch/test_control.py::test_values_of_the_options',
                  'pytorch/test_control.py::test_the_configuration'],
    'torch_compute_dtype': [
        'pytorch/test_compute_dtype.py::test_the_environment_variable',
        'pytorch/test_compute_dtype.py::test_values_of_the_option'],
    'repeated_with_state_before': ['../laws/test_forget.py::test_forget'],
    'state_of_forget': ['../laws/test_forget.py::test_forget'],
    'base_of_another_library': ['fixes/test_chainer_bugs.py::test_strides_of_foreign_memory'],
    'batch_of_rows': ['fixes/test_chainer_bugs.py::test_an_array_is_a_batch_of_its_rows'],
    'evaluated_type_checks': [
        'fixes/test_chainer_bugs.py::test_a_type_check_evaluates_expressions'],
    'fused_updates': ['updates/test_updates.py::test_switches'],
    **dict.fromkeys(['elementwise_updates', 'kernels_of_many_parameters'], (
        '../gpu/test_updates_on_gpu.py::test_the_bits_of_chainer',)),
    'hooks_of_many_parameters': ['../gpu/test_updates_on_gpu.py::test_hooks_and_loss_scale'],
    **dict.fromkeys(['hooks_of_scaled_gradients', 'hooks_that_know_the_scale',
                     'hooks_without_loss_scale', 'owned_gradients'], (
        'updates/test_hooks.py::test_optimizer_hooks',
        'updates/test_hooks.py::test_hooks_of_float16_keep_small_gradients')),
    **dict.fromkeys(['backward_of_losses', 'gradient_of_average_pooling'], (
        'test_every_function.py::test_backward_changes_no_gradient_that_it_gets',)),
    'slice_gradient': ['graph/test_gradients.py::test_slices_without_add_at'],
    'softmax_gradient': ['graph/test_gradients.py::test_one_pass'],
    'updates_in_blocks': ['updates/test_updates.py::test_few_calls_of_rules'],
    'updates_in_one_pass': ['updates/test_updates.py::test_few_calls_of_rules'],
    'quick_graph': ['graph/test_graph.py::test_ordinary_calls_do_not_run_the_original'],
    'gradients_within_backward': [
        'graph/test_graph.py::test_gradients_of_a_backward_within_backward'],
    'device_of_backward': ['graph/test_graph.py::test_backward_enters_no_device_on_the_host'],
    'removed_aliases': ['names/test_numpy_aliases.py::test_error'],
    'old_arguments': ['dialect/test_old_arguments.py::test_the_same_bits',
                      'dialect/test_old_arguments.py::test_one_warning_per_line'],
    'called_functions': ['dialect/test_old_calls.py::test_values'],
    'invoke_before_training': ['dialect/test_old_calls.py::test_values'],
    'old_names': ['dialect/test_old_calls.py::test_names'],
    'old_optimizers': ['dialect/test_old_calls.py::test_values'],
    'scaled_initializers': ['dialect/test_old_calls.py::test_values'],
    'stateless_gru': ['dialect/test_old_calls.py::test_values'],
    'train_attributes': ['dialect/test_old_calls.py::test_values'],
    'cudnn_attributes': [f'{OLD_ATTRIBUTES}test_cudnn_attributes'],
    'device_of_updater': [f'{OLD_ATTRIBUTES}test_device_of_an_updater'],
    'position_of_iterator': [f'{OLD_ATTRIBUTES}test_position_of_an_iterator'],
    'functions_of_vision_models': [f'{OLD_ATTRIBUTES}test_functions_of_a_vision_model'],
    'patients_of_trigger': [f'{OLD_ATTRIBUTES}test_patients'],
    'variables_in_graph': [f'{OLD_ATTRIBUTES}test_nodes_of_the_graph'],
    'functions_of_hooks': [f'{OLD_ATTRIBUTES}test_functions_of_a_hook'],
    'no_invoke_before_training': [
        f'{OLD_ATTRIBUTES}test_an_extension_is_not_invoked_before_training'],
    'backward_of_old_subclasses': [
        'dialect/test_old_helpers.py::test_backward_of_an_old_subclass'],
    'hash_of_variable': [f'{OLD_ATTRIBUTES}test_variables_in_sets'],
    **dict.fromkeys(['type_check_enable', 'type_checks_turned_off'], (
        f'{OLD_ATTRIBUTES}test_type_checks_can_be_turned_off',)),
    'option_compared_with_none': [
        'fixes/test_example_programs.py::test_an_option_that_is_compared_with_none'],
    'sizes_of_subclasses': ['fixes/test_example_programs.py::test_sizes_of_a_subclass'],
    'uninitialized_params': ['dialect/test_old_calls.py::test_values'],
    'parameter_link': ['dialect/test_old_calls.py::test_no_warning_of_a_link_that_chainer_has'],
    'volatile': ['dialect/test_old_calls.py::test_values'],
    **dict.fromkeys(['best_value', 'dumped_graph', 'shift_of_version_1'], (
        f'{OLD_SNAPSHOTS}test_trainer',)),
    **dict.fromkeys(['text_of_python_2', 'updates_of_parameters'], (
        f'{OLD_SNAPSHOTS}test_trainer', f'{OLD_SNAPSHOTS}test_optimizers')),
    'objects_not_in_hdf5': [f'{OLD_SNAPSHOTS}test_object_not_in_hdf5'],
    **dict.fromkeys(['attributes_of_old_pickles', 'methods_of_old_pickles', 'old_pickled_links',
                     'old_pickled_parameters'], (f'{OLD_SNAPSHOTS}test_pickled_model',)),
    'shift_of_integers': ['test_training.py::test_loading_into_a_shift_that_has_started'],
    'scalar_hyperparameters': ['test_scalar_options.py::test_optimizers'],
    'scalar_options': ['test_every_function.py::test_options_can_be_numpy_scalars'],
}


def test_every_shim_is_here():
    names = {shim.__name__ for shim in registry.find_shims()}
    assert {*USES} < names == set(TESTS)


@each_case('test', sorted(set(itertools.chain(*TESTS.values()))))
def test_the_test_of_a_shim_is_there(test):
    file, _, name = test.partition('::')
    text = FOLDER.joinpath(file).read_text(encoding='utf-8')
    assert f'\ndef {name}(' in text


@pytest.mark.sample(4)
@pytest.mark.parametrize('name', USES)
def test_with(python, name):
    python(f'import chainer\n{USES[name]}' if 'sys' not in USES[name] else USES[name])


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize('name', [
    # Without its shim, this one waits for long.
    pytest.param(name, marks=pytest.mark.full if name == 'dead_worker' else ()) for name in USES])
def test_fails_without(python, name):
    shim = next(shim for shim in registry.find_shims() if shim.__name__ == name)
    if not registry.is_active(shim) and 'cupy' not in shim.__module__:
        pytest.skip('The versions here do not need it')
    said = python(USES[name], check=False, WITHOUT_SHIM=name)
    assert said.startswith('1 Traceback'), said


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize('name', sorted({*TESTS} - {*USES, 'cudnn_warning'}))
def test_a_test_fails_without(python, name):
    shim = next(shim for shim in registry.find_shims() if shim.__name__ == name)
    if not registry.is_active(shim):
        pytest.skip('The versions here do not need it')
    tests = [str(FOLDER / test) for test in TESTS[name] if '/gpu/' not in test]
    if not tests:
        pytest.skip('Its tests need a GPU')
    options = ['-x', '--full', '-p', 'no:cacheprovider', '-p', 'no:xdist', *tests]
    said = python(f'import pytest, sys\nsys.exit(pytest.main({options}))', check=False,
                  WITHOUT_SHIM=name)
    assert said.startswith('1 ') and '\nFAILED ' in said, said


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
