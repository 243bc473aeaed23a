"""Bugs in Chainer 7.8.1 that were fixed after the last release, or never."""

import functools
import types
from collections.abc import Callable
from typing import Any

from chainer_compat.patching.registry import edit, patch


@patch('chainer.functions.connection.deconvolution_2d')
def deconvolution_cover_all(deconvolution_2d: Any) -> None:
    """All versions: backward raised ValueError if only W, not x, required a gradient."""
    function = deconvolution_2d.Deconvolution2DFunction
    set_cover_all = function._set_cover_all

    def set_from_shapes(self: Any, x: Any, W: Any) -> None:  # noqa: N803  (Chainer's name)
        # The function expects shapes, but one of its three callers passes arrays.
        set_cover_all(self, getattr(x, 'shape', x), getattr(W, 'shape', W))

    function._set_cover_all = set_from_shapes


@patch('chainer.device_resident')
def metaclass_of_links(device_resident: Any) -> None:
    """All versions: cloudpickle could not load the classes of models that a script defines.

    Their metaclass had no name by which it can be imported, so it was copied, which raised a
    metaclass conflict. ``chainermn.launch`` uses cloudpickle.
    """
    meta = type(device_resident.DeviceResident)
    meta.__module__, meta.__qualname__ = device_resident.__name__, meta.__name__
    setattr(device_resident, meta.__name__, meta)


@edit('chainer.optimizers.adam')
def rate_before_the_first_update() -> dict[str, str]:
    """All versions: ``observe_lr`` raised RuntimeError if Adam had made no update yet.

    Now it observes the learning rate of the first update. Iterations may pass before that update:
    in the first one, ChainerMN only broadcasts parameters, and it can accumulate gradients.
    """
    return {'if t == 0:': 'if not (t := max(t, 1)):'}


@edit('chainer.optimizer')
def update_before_setup() -> dict[str, str]:
    """All versions: ``update`` before ``setup`` computed the loss, then raised AttributeError."""
    line = "use_cleargrads = getattr(self, '_use_cleargrads', True)"
    return {line: f'self._check_set_up(); {line}'}


@edit('chainer.optimizer')
def setup_of_something_else() -> dict[str, str]:
    """All versions: the error of ``setup`` did not show what was passed.

    ChainerMN's Pipeline, for example, wraps a model but is passed to ``update``.
    """
    return {"'optimization target must be a link'":
            "'optimizer.setup(model) expects a chainer.Link, not '"
            " + getattr(link, '__name__', type(link).__name__) + '. Pass loss functions, such as '"
            "'a Pipeline, to optimizer.update instead.'"}


@patch('chainer.functions.array.transpose_sequence')
def unused_sequences(transpose_sequence: Any) -> None:
    """All versions: F.transpose_sequence failed in backward if the loss did not use all outputs.

    So did NStepLSTM and similar links on the CPU without PyTorch.
    """
    function = transpose_sequence.TransposeSequence
    backward = function.backward

    def backward_with_zeros(self: Any, indexes: Any, grad_outputs: Any) -> Any:
        from chainer import Variable

        known = next(grad for grad in grad_outputs if grad is not None)
        lengths = [sum(len_x > i for len_x, *_ in (x.shape for x in self.inputs))
                   for i in range(len(grad_outputs))]
        return backward(self, indexes, tuple(
            Variable(known.xp.zeros((length, *known.shape[1:]), known.dtype))
            if grad is None else grad
            for grad, length in zip(grad_outputs, lengths, strict=True)))

    function.backward = backward_with_zeros


@edit('chainer.functions.connection.embed_id')
def no_ids() -> dict[str, str]:
    """All versions: backward of F.embed_id raised ValueError if there was no ID in the batch.

    Without PyTorch, this also happened on a rank without examples.
    """
    return {'gy.reshape(x.size, -1)': 'gy.reshape(x.size, self.w_shape[1])'}


@patch('chainer.functions.loss.hinge', 'chainer.functions.loss.ctc')
def backward_of_losses(module: Any) -> None:
    """All versions: backward of F.hinge divided its incoming gradient in place.

    Other functions, such as the other branch of a sum, get the same array. A second backward pass
    of F.hinge and F.connectionist_temporal_classification was wrong, because the first one changed
    arrays that both need.
    """
    function, name = ((module.Hinge, 'bottom_diff') if hasattr(module, 'Hinge') else
                      (module.ConnectionistTemporalClassification, 'yseq'))
    backward = function.backward

    def backward_of_copies(self: Any, inputs: Any, grad_outputs: Any) -> Any:
        original = getattr(self, name)
        setattr(self, name, original.copy())
        try:
            return backward(self, inputs, tuple(grad.copy() for grad in grad_outputs))
        finally:
            setattr(self, name, original)

    function.backward = backward_of_copies


@edit('chainer.functions.pooling.average_pooling_nd')
def gradient_of_average_pooling() -> dict[str, str]:
    """All versions: F.average_pooling_nd(pad_value=None) divided its incoming gradient in place.

    Other functions, such as the other branch of a sum, get the same array.
    """
    return {
        'numpy.divide(gy, func.width, out=gy)':
            'gy = numpy.divide(gy, func.width, out=numpy.empty_like(gy))',
        'gy *= coeff': 'gy = gy.copy(); gy *= coeff',
    }


@edit('chainer.datasets.image_dataset')
def examples_of_zipped_images() -> dict[str, str]:
    """All versions: iterators could not read ZippedImageDataset and MultiZippedImageDataset.

    They rejected NumPy integers, which iterators pass as indices.
    """
    return {'isinstance(i_or_filename, six.integer_types)': 'not isinstance(i_or_filename, str)'}


@edit('chainer.utils.conv', 'chainer.utils.conv_nd_kernel')
def large_columns() -> dict[str, str]:
    """All versions: im2col and col2im used int32 indices on GPUs.

    Convolutions without cuDNN read out of bounds if there were 2**31 elements or more.
    """
    one = "'(ptrdiff_t)1'"
    return {
        'int c0 = i / (kh * kw * out_h * out_w);': 'ptrdiff_t c0 = i / out_w / out_h / kw / kh;',
        'int ky = i / (kw * out_h * out_w) % kh;': 'int ky = i / out_w / out_h / kw % kh;',
        'int kx = i / (out_h * out_w) % kw;': 'int kx = i / out_w / out_h % kw;',
        'int c0 = i / (h * w);': 'ptrdiff_t c0 = i / w / h;',
        'int k = out_y': 'ptrdiff_t k = out_y',
        # in any number of dimensions
        "'int c0 = i / ({});'": "'ptrdiff_t c0 = i / ({});'",
        "'int {} = {} + {} * {};'": "'ptrdiff_t {} = {} + {} * {};'",
        'mulexp(ks + outs)': f'mulexp(ks + outs, {one})',
        'mulexp(ds)': f'mulexp(ds, {one})',
        'mulexp(tail)': f'mulexp(tail, {one})',
    }


@patch('chainer.optimizers.msvag')
def msvag_of_float16(msvag: Any) -> None:
    """All versions: the first update of MSVAG in float16 was too small, and on a GPU zero.

    It divided the difference of two equal numbers by 1e-4, which amplified rounding errors; on a
    GPU, 1e-4 was rounded to 0. Updates of float16 parameters are now computed in float32.
    """

    def in_float32(update_core: Any) -> Any:
        def update(self: Any, param: Any) -> None:
            if param.dtype != 'float16' or param.grad is None:
                return update_core(self, param)
            narrow = {key: self.state[key] for key in ('m', 'v')}
            self.state.update({key: array.astype('f') for key, array in narrow.items()})
            wide = types.SimpleNamespace(data=param.data.astype('f'), grad=param.grad.astype('f'))
            update_core(self, wide)
            param.data[...] = wide.data
            for key, array in narrow.items():
                array[...] = self.state[key]
            self.state.update(narrow)

        return update

    rule = msvag.MSVAGRule
    rule.update_core_cpu = in_float32(rule.update_core_cpu)
    rule.update_core_gpu = in_float32(rule.update_core_gpu)


@edit('chainer.optimizer_hooks.gradient_clipping')
def norm_of_all_gradients() -> dict[str, str]:
    """All versions: squares of float16 overflowed, so GradientClipping set all gradients to zero.

    The squares of each parameter are summed in float32, and the sums of all parameters are added
    in float64, as with NumPy 1.
    """
    return {
        'g = g.ravel()': "g = g.ravel().astype('f' if g.dtype == 'e' else g.dtype, copy=False)",
        'sum(dots)': 'sum([x.item() if isinstance(x, numpy.generic) else x for x in dots])',
        'grad *= rate': 'grad *= float(rate) if isinstance(rate, numpy.generic) else rate',
    }


@edit('chainer.optimizer_hooks.gradient_lars')
def rate_of_lars() -> dict[str, str]:
    """All versions: GradientLARS computed norms, and with NumPy >= 2.0 also ``eps``, in float16.

    Gradients so small that their squares are zero got a huge or infinite rate.
    """
    norm = ("xp.linalg.norm({0}.astype('f' if {0}.dtype == 'e' else {0}.dtype, copy=False))"
            ".astype('d' if xp.__name__ == 'numpy' else 'f', copy=False)")
    return {f'xp.linalg.norm({each})': norm.format(each) for each in 'pg'}


@patch('chainer.optimizer_hooks.gradient_clipping')
def clipping_of_zeros(gradient_clipping: Any) -> None:
    """All versions: GradientClipping divided by zero, with a warning, if all gradients are zero.

    With 2-bit compression, the first gradients are zero. The result was correct: gradients did not
    change.
    """
    hook = gradient_clipping.GradientClipping
    clip = hook.__call__

    def clip_silently(self: Any, opt: Any) -> None:
        import numpy as np

        with np.errstate(divide='ignore'):
            clip(self, opt)

    hook.__call__ = clip_silently


@edit('chainer.functions.array.as_strided')
def base_of_another_library() -> dict[str, str]:
    """All versions: F.as_strided raised AttributeError for arrays that do not own their memory.

    Examples are arrays from PyTorch, mmap or bytes.
    """
    return {'while base_array_candidate.base is not None:':
            'while isinstance(base_array_candidate.base, np.ndarray):'}


@edit('chainer.functions.normalization.batch_normalization')
def samples_of_this_rank() -> dict[str, str]:
    """All versions: multi-node batch normalization warned if a rank had only one sample.

    The check did not count the samples of the other ranks.
    """
    condition = 'if all(x_shape[i] == 1 for i in self.axis):'
    return {condition: condition.replace('if', 'if self._impl_selector is _impl_selector and')}


@edit('chainer.functions.activation.log_softmax', 'chainer.functions.activation.softmax',
      'chainer.functions.loss.softmax_cross_entropy')
def invalid_types() -> dict[str, str]:
    """All versions: softmax functions raised RuntimeError instead of InvalidType.

    For example, the error of F.softmax_cross_entropy for inputs of different lengths did not show
    the shapes.
    """
    return {
        '-x_type.ndim <= self.axis < x_type.ndim':
            '-x_type.ndim <= self.axis, self.axis < x_type.ndim',
        "if t_type.dtype.kind == 'i':": "if type_check.eval(t_type.dtype.kind) == 'i':",
    }


@edit('chainer.functions.pooling.roi_pooling_2d')
def regions_outside_of_the_image() -> dict[str, str]:
    """All versions: backward of F.roi_pooling_2d failed if a region extended beyond the image.

    It raised IndexError on the CPU; beyond the left edge, it added gradients of other pixels. A
    region that ends before it begins counts as one pixel, but its gradient was zero.
    """
    return {'range(xmin, xmax + 1)': 'range(max(xmin, 0), min(xmin + roi_width, width))',
            'range(ymin, ymax + 1)': 'range(max(ymin, 0), min(ymin + roi_height, height))',
            'w <= roi_end_w': 'w <= max(roi_end_w, roi_start_w)',
            'h <= roi_end_h': 'h <= max(roi_end_h, roi_start_h)'}


@edit('chainer.training.extensions.progress_bar')
def progress_bar_arguments() -> dict[str, str]:
    """All versions: ProgressBar ignored ``training_length``, ``bar_length`` and ``out``."""
    return {
        'out=sys.stdout': 'out=None',  # the current sys.stdout, not the one at import time
        'self._recent_timing = []': 'self._pbar = _TrainerProgressBar(bar_length, out)',
        'self._pbar = _TrainerProgressBar()': 'self._pbar.training_length = training_length',
    }


@edit('chainer.variable')
def zerograd_of_read_only() -> dict[str, str]:
    """All versions: ``zerograd`` failed for read-only gradients, such as the ones from F.sum."""
    return {'self._grad.fill(0)': 'self._grad.fill(0) if getattr(self._grad.flags, "writeable", '
                                  'True) else setattr(self, "grad", xp.zeros_like(arr))'}


@patch('chainer.variable')
def gradients_without_variables(variable: Any) -> None:
    """All versions: ``backward(retain_grad=True)`` lost the gradients of intermediate variables.

    Only Variables held the gradients, and a Variable is freed with its last reference. Code that
    walks the graph through ``creator`` and ``inputs`` found ``None``.
    """
    node = variable.VariableNode
    store, stored = node._set_grad_var_if_available, node.grad_var.fget

    def store_in_node(self: Any, grad: Any) -> None:
        store(self, grad)
        self._retained_grad = grad

    def grad_var(self: Any) -> Any:
        return getattr(self, '_retained_grad', None) if self._variable() is None else stored(self)

    def grad(self: Any) -> Any:
        return None if self.grad_var is None else self.grad_var.array

    node._set_grad_var_if_available = store_in_node
    node.grad_var = property(grad_var, doc=node.grad_var.__doc__)
    node.grad = property(grad, doc=node.grad.__doc__)


@edit('chainer.training.triggers.minmax_value_trigger')
def best_value_without_values() -> dict[str, str]:
    """All versions: MinValueTrigger and MaxValueTrigger failed after resuming.

    If the extension that saves the trainer ran before them, they fire again in the next iteration,
    without a new value. After that, a missing value raises KeyError, as does a key that is never
    reported.
    """
    serialize = "self._interval_trigger.serialize(serializer['interval_trigger'])"
    return {
        'if not self._interval_trigger(trainer):':
            'if not self._interval_trigger(trainer) or ('
            'vars(self).pop("_is_resumed", False) and key not in summary._summaries):',
        serialize:
            'from chainer_compat.fixes.saved_state import is_deserializer; self._is_resumed = '
            f'is_deserializer(serializer) or getattr(self, "_is_resumed", False); {serialize}',
    }


@edit('chainer.training.extensions.parameter_statistics')
def parameter_without_gradient() -> dict[str, str]:
    """All versions: ParameterStatistics failed if a parameter had no gradient, or no data yet.

    With ``n_accumulations`` of a multi-node optimizer, gradients exist only after each n-th update.
    """
    return {'in self._attrs:': 'in [a for a in self._attrs if getattr(param, a) is not None]:'}


@edit('chainer.training.extensions.evaluator')
def evaluator_without_iterator() -> dict[str, str]:
    """All versions: an Evaluator with the iterators ``{'main': None}`` failed in ``finalize``.

    Evaluators that generate their own examples, as in Chainer's seq2seq example, have no iterator.
    """
    return {
        'in six.itervalues(self._iterators):':
        'in (i for i in self._iterators.values() if i is not None):',
    }


@edit('chainer.training.extensions.evaluator')
def evaluator_that_repeats() -> dict[str, str]:
    """All versions: the warning about an Evaluator that never ends showed ``the iterator {}``.

    The rest of its text was missing. Now it is complete, with the iterator's name, and points to
    the line of the script.
    """
    return {
        "msg = 'The `repeat`": "msg = ('The `repeat`",
        "'of iterators'.format(key)": "'of iterators').format(key)",
        'warnings.warn(msg)': 'warnings.warn(msg, stacklevel=2)',
    }


@edit('chainer.training.extensions._snapshot')
def picklable_cleanup() -> dict[str, str]:
    """All versions: ``snapshot(writer=ProcessWriter(), n_retains=n)`` could not be pickled.

    The start methods forkserver and spawn pickle the writer and its functions.
    """
    return {
        'self.writer._add_cleanup_hook(_cleanup)':
            'from chainer_compat.fixes.stale_snapshots import Removal; '
            'self.writer._add_cleanup_hook(Removal(self.filename, outdir, self.n_retains))'
    }


@patch('chainer.training.extensions.snapshot_writers')
def picklable_writers(snapshot_writers: Any) -> None:
    """All versions: ProcessWriter could not be pickled for its second snapshot.

    It kept the process that had written the first one.
    """

    def getstate(self: Any) -> dict[str, Any]:
        return {**vars(self), '_worker': None}

    snapshot_writers.ProcessWriter.__getstate__ = getstate


@patch('chainer.training.extensions.snapshot_writers')
def cleanup_of_queues(snapshot_writers: Any) -> None:
    """All versions: ``n_retains`` of ``snapshot`` was ignored with the writers that use a queue."""

    def add_cleanup_hook(self: Any, hook: Any) -> None:
        if isinstance(self._task, snapshot_writers.Writer):  # the task writes, in another process
            self._task._add_cleanup_hook(hook)

    snapshot_writers.QueueWriter._add_cleanup_hook = add_cleanup_hook


@patch('chainer.training.extensions.snapshot_writers')
def copies_for_writers(snapshot_writers: Any) -> None:
    """All versions: snapshots written by a thread or queue could contain later parameters.

    Later updates changed the arrays while they were being written.
    """
    import numpy as np

    def with_copies(write: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(write)
        def call(self: Any, filename: Any, outdir: Any, target: Any) -> None:
            if isinstance(target, dict):
                target = {key: value.copy() if isinstance(value, np.ndarray) else value
                          for key, value in target.items()}
            write(self, filename, outdir, target)

        return call

    for writer in snapshot_writers.ThreadWriter, snapshot_writers.QueueWriter:
        writer.__call__ = with_copies(writer.__call__)


@edit('chainer.dataset.convert')
def batch_of_rows() -> dict[str, str]:
    """All versions: ``concat_examples(array)`` raised ValueError about an array's truth value.

    An array counts as a batch of its rows. Chainer 1 to 6 accepted it.
    """
    return {'if not batch:': 'if len(batch) == 0:'}


@patch('chainer.functions.util.forget')
def state_of_forget(forget: Any) -> None:
    """All versions: F.forget recomputed its function with the state after the function's last call.

    If links with SpectralNormalization or BatchRenormalization were called twice before backward,
    gradients of the first call were wrong. So were gradients of functions that draw random numbers
    or count their calls.
    """
    function = forget.Forget
    forward, backward = function.forward, function.backward

    def forward_with_state(self: Any, inputs: Any) -> Any:
        from chainer_compat.graph.forward_state import state_before

        with state_before(self.func) as self._state:
            return forward(self, inputs)

    def backward_with_state(self: Any, indexes: Any, grad_outputs: Any) -> Any:
        now = self._state.again()
        self._state.restore(keep_new_parameters=True)
        try:  # restore only at the end, because the new graph may contain arrays of the links
            return backward(self, indexes, grad_outputs)
        finally:
            now.restore(keep_new_parameters=True)

    function.forward, function.backward = forward_with_state, backward_with_state


@edit('chainer.functions.util.forget')
def repeated_with_state_before() -> dict[str, str]:
    """All versions: when F.forget recomputed links, they saw the state after the first call.

    Now the state before the first call is restored, so the second call is identical.
    """
    return {"('in_recomputing', True)": "('in_recomputing', False)"}
