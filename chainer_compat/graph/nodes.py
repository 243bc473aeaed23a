"""Chainer's computational graph with less time per function, for ordinary calls.

``FunctionNode.apply`` spends most of its time on rare cases: ChainerX, debug mode, hooks, static
graphs, memory layouts and unusual arrays. :func:`quick_apply` handles calls without any of these,
and leaves all other calls to Chainer. Both call the same methods and build the same graph.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import chainer
import numpy as np
from chainer import FunctionNode, Parameter, Variable
from chainer.backends import cuda
from chainer.configuration import config, global_config
from chainer.variable import VariableNode

from chainer_compat.graph import type_checks

Array: TypeAlias = Any  # of NumPy or CuPy
Apply: TypeAlias = Callable[[FunctionNode, Sequence[Any]], tuple[Variable, ...]]

#: An input of a run of functions (``pytorch.recording``): a tensor without history, or ``None`` if
#: it needs no gradient; the array whose memory the tensor shares, or ``None`` if the Variable has a
#: tensor of its own; and the level of the run.
Leaf: TypeAlias = tuple[Any, Any, int]

KINDS = (np.ndarray, cuda.ndarray)


class _NoLayouts(dict[int, tuple[None, ...]]):
    """Maps a number of arrays to their memory layouts; Chainer uses ``None`` for NumPy arrays."""

    def __missing__(self, n: int) -> tuple[None, ...]:
        self[n] = layouts = (None,) * n
        return layouts


NO_LAYOUTS = _NoLayouts()


class _OfThread(threading.local):
    #: Receives the node of a Variable and its gradient as soon as the gradient is complete, if the
    #: gradients of several functions are computed together.
    ready: Callable[[VariableNode, Array], None] | None = None


of_thread = _OfThread()

_NOTHING = contextlib.nullcontext()

#: ``pytorch.recording.record``; until PyTorch is imported, a function that imports it when called.
record: Callable[[FunctionNode, Sequence[Any], dict[str, Any]],
                 tuple[Variable, ...] | Exception | None] | None = None

_thread_local = chainer._thread_local
_init = Variable.__init__
_init_impl = Variable._init_impl
_init_node = VariableNode.__init__
_check_layouts = FunctionNode.check_layout_forward

#: Methods that user code can replace on a function object.
_REPLACEABLE = frozenset({'check_type_forward', '_check_data_type_forward', 'check_layout_forward',
                          'forward', 'backward', 'backward_accumulate'})


class TensorData(list[Any]):
    """The list with one array in ``Variable._data``, if the Variable has a PyTorch tensor.

    The array is created when it is first read, and shares the memory of the tensor. ``tensor`` is
    ``None`` once user code has set a different array.
    """

    __slots__ = 'output', 'tensor'

    output: int  # the index of the Variable among the outputs of its function
    tensor: Any

    def __getitem__(self, index: Any) -> Any:
        if not len(self):
            array = self.tensor.detach().numpy()
            if not array.shape:
                # Users collect losses in lists. Between PyTorch's large blocks, they would fragment
                # memory, so copy scalars to memory of NumPy.
                import torch

                array = array.copy()
                self.tensor.data = torch.from_numpy(array)
            elif 0 in array.strides and array.size:
                array.flags.writeable = False  # like the result of np.broadcast_to
            self.append(array)
        return super().__getitem__(index)

    def __setitem__(self, index: Any, array: Any) -> None:
        self[index]  # creates the array, so that the list has an element
        self.tensor = None
        super().__setitem__(index, array)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, ([self[0]],)

    def forget_history(self) -> None:
        """Free PyTorch's graph of the tensor. A scalar only keeps its array."""
        if self.tensor is not None:
            if self.tensor.shape:
                self.tensor = self.tensor.detach()
            else:
                self[0]  # creates the array
                self.tensor = None


def quick_apply(original: Apply) -> Apply:
    """Return a faster ``FunctionNode.apply``, which passes unusual calls to ``original``."""

    @functools.wraps(original)
    def apply(self: FunctionNode, inputs: Sequence[Any]) -> tuple[Variable, ...]:
        local = config._local.__dict__
        if type(inputs) not in (tuple, list):
            # F.concat(variable), used by light-head-rcnn, joins the rows. Chainer 7.8.1 rejects it.
            inputs = tuple(inputs)
        if _is_rare(self, local):
            keep_history(inputs)
            return original(self, inputs)
        if record is None:
            return ordinary(self, inputs, local)
        recorded = record(self, inputs, local)
        if type(recorded) is tuple:
            return recorded
        keep_history(inputs)
        results = ordinary(self, inputs, local)
        if recorded is not None:
            warnings.warn(f'PyTorch failed to compute {self.label}, so Chainer computed it instead '
                          '(CHAINER_USE_TORCH=never disables PyTorch): '
                          f'{type(recorded).__name__}: {recorded}', stacklevel=3)
        return results

    def ordinary(self: FunctionNode, inputs: Sequence[Any], local: dict[str, Any]
                 ) -> tuple[Variable, ...]:
        found = _arrays(inputs)
        if found is None:
            return original(self, inputs)
        kind, arrays = found
        variables = [x if isinstance(x, Variable) else variable(x, False) for x in inputs]
        self._input_layouts = NO_LAYOUTS[len(variables)]
        if local.get('type_check', global_config.type_check):
            type_checks.check(self, arrays)
        if type(self).check_layout_forward is not _check_layouts:
            self.check_layout_forward(variables)

        self._input_indexes_to_retain = self._output_indexes_to_retain = None
        if kind is np.ndarray:
            outputs = self.forward(arrays)
        else:
            with cuda.Device(arrays[0].device.id):
                outputs = self.forward(arrays)
        if not _are_ordinary(self, outputs, kind):
            return _continue_in_chainer(original, self, variables, outputs)

        self._output_count = len(outputs)
        self._output_layouts = NO_LAYOUTS[self._output_count]
        requires_grad = any([x._requires_grad for x in variables])
        results = tuple([variable(y, requires_grad) for y in outputs])
        if local.get('enable_backprop', global_config.enable_backprop):
            connect(self, variables, results)
            self.lazy_grad_sum = local.get('lazy_grad_sum', global_config.lazy_grad_sum)
        return results

    return apply


def quick_link_call(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a faster ``Link.__call__``; ``original`` calls links with hooks or a mixin's call."""
    above = chainer.Link.__mro__[1:]
    n_above = len(above)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = self.__dict__
        if (own.get('_local_link_hooks') or _thread_local.__dict__.get('link_hooks')
                or type(self).__mro__[-n_above:] != above or not own.get('_Link__init_done')):
            return original(self, *args, **kwargs)
        return self.forward(*args, **kwargs)

    return call


def keep_history(inputs: Sequence[Any]) -> None:
    """Let gradients enter a run at these outputs, even if their Variables are freed."""
    for x in inputs:
        if isinstance(x, Variable):
            data = x._data
            if type(data) is TensorData and data.tensor is not None and data.tensor.requires_grad:
                x._node._edge = data.tensor.grad_fn, data.tensor.output_nr


def _is_rare(node: FunctionNode, local: dict[str, Any]) -> bool:
    """Return whether options, hooks or replaced methods need Chainer's code."""
    return bool(node._local_function_hooks or not _REPLACEABLE.isdisjoint(node.__dict__)
                or _is_watched(local))


def _is_watched(local: dict[str, Any]) -> bool:
    """Return whether options, global hooks or replaced constructors need Chainer's code."""
    return bool(
        local.get('debug', global_config.debug)
        or local.get('schedule_func', global_config.schedule_func) is not None
        or _thread_local.__dict__.get('function_hooks')
        or Variable.__init__ is not _init or Variable._init_impl is not _init_impl
        or VariableNode.__init__ is not _init_node)


def is_gradient_only() -> bool:
    """Return whether gradients need no graph, and nothing observes the calls of functions.

    In this case, ``backward`` of a function may compute gradients without calling other functions.
    """
    local = config._local.__dict__
    return not (local.get('enable_backprop', global_config.enable_backprop)
                or _is_watched(local))


def connect(function: FunctionNode, inputs: Sequence[Variable], outputs: Sequence[Variable]
             ) -> None:
    """Add a function to the graph, and keep the arrays that it asked to retain."""
    nodes = tuple([x._node for x in inputs])
    connect_nodes(function, nodes, max([node._rank for node in nodes]), inputs, outputs)


def connect_nodes(function: FunctionNode, nodes: tuple[VariableNode, ...], rank: int,
                  inputs: Sequence[Variable], outputs: Sequence[Variable]) -> None:
    """Add a function with these input nodes to the graph; ``rank`` is their highest rank."""
    function.inputs = nodes
    function.rank = rank
    references = []
    for y in outputs:
        node = y._node
        node._creator_node = function
        node._rank = rank + 1
        references.append(weakref.ref(node))
    function.outputs = tuple(references)
    if function._input_indexes_to_retain is not None:
        for index in function._input_indexes_to_retain:
            x = inputs[index]
            data = x._data  # like retain_data, which also sets dtype and shape
            x._node._data = data if type(data) is TensorData else data[0]
    if function._output_indexes_to_retain is not None:
        retained = []
        for index in function._output_indexes_to_retain:
            y = outputs[index]
            if type(y._data) is TensorData:
                y._node._data = y._data
                retained.append(y._data)
            else:
                y.retain_data()
                retained.append(y._data[0])
        function._retained_output_data = tuple(retained)


def check_types(function: FunctionNode, inputs: Sequence[Variable]) -> None:
    """Check the types of inputs, as Chainer does."""
    type_checks.check(function, [
        x._node if type(x._data) is TensorData else x._data[0] for x in inputs], inputs)


def variable(array: Array, requires_grad: bool) -> Variable:
    """Create a Variable and its node, as Chainer's constructors do."""
    return variable_of([array], requires_grad, array.dtype, array.shape)


def variable_of(data: list[Array], requires_grad: bool, dtype: np.dtype[Any],
                shape: tuple[int, ...]) -> Variable:
    """Create a Variable and its node.

    Args:
        data: A list that contains only its array.
        requires_grad: Whether it requires gradients.
        dtype: The array's dtype.
        shape: The array's shape.
    """
    made = Variable.__new__(Variable)
    made._requires_grad = requires_grad
    made._loss_scale = made._grad_var = made._device = None
    made._grad_valid = True
    made._layout = None
    made._data = data
    node = VariableNode.__new__(VariableNode)
    node._variable = weakref.ref(made)
    node.name = None
    node._requires_grad = requires_grad
    node._layout = None
    node.dtype = dtype
    node.shape = shape
    made._node = node
    made._grad = None
    return made


def _arrays(inputs: Sequence[Any]) -> tuple[type, tuple[Array, ...]] | None:
    """Return the type of the input arrays, and the arrays; ``None`` if an input is unusual."""
    arrays = []
    kind = None
    for x in inputs:
        cls = type(x)
        if cls is Variable or cls is Parameter:
            if x._layout is not None:
                return None
            x = x._data[0]
            cls = type(x)
        if cls is not kind:
            if kind is not None or cls not in KINDS:
                return None
            kind = cls
        arrays.append(x)
    return None if kind is None else (kind, tuple(arrays))


def _are_ordinary(function: FunctionNode, outputs: Any, kind: type) -> bool:
    """Return whether ``outputs`` is a tuple of arrays of type ``kind`` without memory layouts."""
    if type(outputs) is not tuple:
        return False
    for y in outputs:
        if type(y) is not kind:
            return False
    layouts = function._output_layouts
    if function.is_elementwise:
        return layouts is None and all([y.shape == outputs[0].shape for y in outputs])
    return layouts is None or layouts == (None,) * len(outputs)


def _continue_in_chainer(original: Apply, node: FunctionNode, inputs: Sequence[Variable],
                         outputs: Any) -> tuple[Variable, ...]:
    """Let Chainer's ``apply`` check the outputs of ``forward``, and continue with them."""
    retained = node._input_indexes_to_retain, node._output_indexes_to_retain

    def forward(_: tuple[Array, ...]) -> Any:
        node._input_indexes_to_retain, node._output_indexes_to_retain = retained
        return outputs

    replaced = node.__dict__.get('forward')
    node.forward = forward
    node.check_layout_forward = lambda inputs: None  # it has already been called
    try:
        with chainer.using_config('type_check', False):
            return original(node, inputs)
    finally:
        del node.forward, node.check_layout_forward
        if replaced is not None:
            node.forward = replaced


def quick_device(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a faster ``get_device_from_array``; ``original`` handles all but NumPy arrays."""

    @functools.wraps(original)
    def get_device_from_array(*arrays: Array | None) -> Any:
        for array in arrays:
            if type(array) is not np.ndarray and array is not None:
                return original(*arrays)
        return chainer.backend.CpuDevice()

    return get_device_from_array


def device_context(arrays: Sequence[Array | None]) -> Any:
    """Return a context manager that selects the device of arrays that are not on the CPU."""
    for array in arrays:
        if type(array) is not np.ndarray and array is not None:
            if type(array) is cuda.ndarray:
                return cuda.Device(array.data.device_id)
            return chainer.using_device(chainer.backend.get_device_from_array(*arrays))
    return _NOTHING


def quick_gradient_check(original: Callable[..., None]) -> Callable[..., None]:
    """Return a faster check of a gradient's type; ``original`` handles the gradients it rejects."""

    @functools.wraps(original)
    def check(func: Any, x: Any, is_node: bool, gradient: Any) -> None:
        if type(x) is VariableNode and type(x._data) is TensorData:
            x._data = x._data[0]  # Chainer compares the type of the array
        if type(x) is VariableNode and x._layout is None and type(gradient) in KINDS and (
                x._data is None or type(x._data) is type(gradient)) and (
                x.dtype == gradient.dtype and x.shape == gradient.shape):
            return
        original(func, x, is_node, gradient)

    return check


def set_gradient(x: Variable, gx: Variable | Array | None) -> None:
    """Set the gradient of a leaf at the end of ``backward``.

    ``backward`` has removed the earlier gradient. If there is one now, a function has called
    ``backward`` itself, and the gradient from that call is added.
    """
    within = x.grad_var
    if within is not None:
        gx = within if gx is None else within + gx
    if gx is None or isinstance(gx, Variable):
        x._set_grad_var_without_check(gx)
    else:
        x._set_grad_without_check(gx)


def keep_tensors(module: Any) -> None:
    """Let nodes retain tensors as their data, and free the history when the graph is cut.

    Args:
        module: ``chainer``.
    """
    FunctionNode._level = None
    FunctionNode._leaves = {}
    VariableNode._edge = VariableNode._leaf = None
    # Python stores attributes compactly if the first objects of a class have them. The first nodes
    # belong to parameters and have fewer attributes than nodes of results. Therefore, first create
    # a node with all attributes.
    node = VariableNode.__new__(VariableNode)
    for name in ('_variable', 'name', '_requires_grad', '_layout', 'dtype', 'shape',
                 '_creator_node', '_rank', '_data', '_leaf', '_edge'):
        setattr(node, name, None)
    data, creator_node = VariableNode.data, VariableNode.creator_node
    update_data_info = VariableNode._update_data_info
    original = FunctionNode.get_retained_outputs

    def get(self: Any) -> Array:
        found = self._data
        return found[0] if type(found) is TensorData else found

    def set_creator(self: Any, function: Any) -> None:
        creator_node.fset(self, function)
        if function is None:
            self._edge = None
            variable = self._variable()
            for found in self._data, None if variable is None else variable._data:
                if type(found) is TensorData:
                    found.forget_history()

    @functools.wraps(update_data_info)
    def forget_leaf(self: Any, array: Array) -> None:
        if self._leaf is not None and self._leaf[1] is not array:
            self._leaf = None
        update_data_info(self, array)

    @functools.wraps(original)
    def get_retained_outputs(self: FunctionNode) -> tuple[Variable | None, ...]:
        retained = self._retained_output_data
        if retained is not None and self._level is not None:
            self._retained_output_data = tuple([
                x[0] if type(x) is TensorData else x for x in retained])
        return original(self)

    VariableNode._update_data_info = forget_leaf
    VariableNode.data = property(get, data.fset)
    VariableNode.creator_node = property(creator_node.fget, set_creator)
    FunctionNode.get_retained_outputs = get_retained_outputs
