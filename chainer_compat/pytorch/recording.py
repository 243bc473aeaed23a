"""Functions that PyTorch's autograd records: one call computes the gradients of adjacent ones.

Without hooks or debug mode, a function with an entry in :data:`EXPRESSIONS` computes with tensors,
and its outputs keep them: the next such function uses the tensors, and arrays are created on first
access. Adjacent functions of this kind form a *run*. ``runs`` computes the gradients of a run in
one call.

A run begins at its leaves, which are tensors without history: parameters, other Variables without a
creator, and outputs of functions without an entry. The functions that follow a function without an
entry belong to a different run, so that gradients can be computed one run after another. Each run
has a *level*, which is higher than the levels of all runs that it depends on.

Chainer's graph stays complete, and each function retains the arrays that its own ``backward``
needs. Therefore, code that inspects the graph works as usual, and Chainer can compute the gradients
itself.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import chainer
import numpy as np
import torch
from chainer import FunctionNode, Parameter, Variable
from chainer.configuration import global_config

from chainer_compat.graph import nodes, type_checks
from chainer_compat.graph.nodes import (
    NO_LAYOUTS,
    Leaf,
    TensorData,
    keep_history,
    variable,
    variable_of,
)
from chainer_compat.graph.settings import OptionError, OptionWarning, raises_errors
from chainer_compat.pytorch import expressions, runs
from chainer_compat.pytorch.tensors.arrays import Expression, is_autocast, shared
from chainer_compat.pytorch.tensors.gpu_arrays import DTYPES
from chainer_compat.pytorch.unsupported import Unsupported


def _class(name: str) -> type[FunctionNode]:
    """Return a class below ``chainer.functions``."""
    module, _, attribute = name.rpartition('.')
    found: type[FunctionNode] = getattr(
        importlib.import_module(f'chainer.functions.{module}'), attribute)
    return found


#: The expression of each class, which is called with the function and tensors. For calls that it
#: does not support, it raises ``Unsupported`` before it changes anything.
EXPRESSIONS: Mapping[type[FunctionNode], Expression] = {
    _class(name): expression for name, expression in expressions.RECORDED.items()}


#: The file of functions that call a kernel.
_DISPATCH = os.path.join(os.path.dirname(__file__), 'dispatch.py')


def _is_of_chainer(method: Any) -> bool:
    """Return whether a method belongs to Chainer or to a kernel, not to a patch or user code."""
    while method is not None:
        file = method.__code__.co_filename
        if not file.startswith(os.path.dirname(chainer.__file__)) and file != _DISPATCH:
            return False
        method = getattr(method, '__wrapped__', None)
    return True


#: For each class: its expression; its original methods, which user code may replace; and the
#: attributes that its type check reads, or ``None`` if they are unknown.
_ENTRIES = {cls: (expression, cls.forward, cls.backward, cls.check_type_forward,
                  type_checks.attributes_of(cls)) for cls, expression in EXPRESSIONS.items()
            if _is_of_chainer(cls.forward) and _is_of_chainer(cls.backward)}

_set_grad_enabled = torch._C._set_grad_enabled
_is_grad_enabled = torch.is_grad_enabled


def record(f: FunctionNode, inputs: Sequence[Any], local: Mapping[str, Any]
           ) -> tuple[Variable, ...] | Exception | None:
    """Call a function whose backward pass is recorded.

    Args:
        f: The function, in a call without hooks.
        inputs: Its inputs.
        local: The configuration of this thread.

    Returns:
        Its outputs. If Chainer has to compute them instead, ``None``, or the error of PyTorch.
    """
    cls = type(f)
    entry = _ENTRIES.get(cls)
    if entry is None:
        return None
    expression, forward, backward, check, attributes = entry
    mode = local.get('use_torch', global_config.use_torch)
    if (mode not in ('auto', 'always') or not _is_grad_enabled() or is_autocast()
            or raises_errors()
            or cls.forward is not forward or cls.backward is not backward
            or cls.check_type_forward is not check):
        return None

    variables: Sequence[Variable] = inputs
    of_inputs = []
    rank = level = 0
    tensors: list[Any] = []
    #: Indexes of inputs that runs have computed, and the levels of these runs.
    of_runs: list[tuple[int, int]] = []
    #: Indexes of the other inputs, which are leaves of this run.
    others: list[int] = []
    requires_grad = False
    signature: list[Any] = [cls]
    for name in attributes or ():
        signature.append(getattr(f, name))
    for i, x in enumerate(inputs):
        kind = type(x)
        if kind is np.ndarray:
            x = variable(x, False)
            variables = *variables[:i], x, *variables[i + 1:]
        elif (kind is not Variable and kind is not Parameter) or x._layout is not None:
            return None
        node = x._node
        of_inputs.append(node)
        own_rank = node._rank
        if own_rank > rank:
            rank = own_rank
        signature += node.dtype, node.shape
        data = x._data
        t = data.tensor if type(data) is TensorData else None
        tensors.append(t)
        if not x._requires_grad:
            others.append(i)
            continue
        requires_grad = True
        creator = node._creator_node
        found = None if creator is None or t is None or not t.requires_grad else creator._level
        if found is None or creator.outputs[data.output]() is not node:
            others.append(i)  # not an output of a run
            found = own_rank
        else:
            of_runs.append((i, found))
        if found > level:
            level = found

    for i, found in of_runs:
        if found != level:
            others.append(i)
    leaves: dict[int, Leaf] = {}
    for i in others:
        x = variables[i]
        t = tensors[i]
        if t is None:
            leaf = x._node._leaf
            array = x._data[0]
            if leaf is None or leaf[1] is not array or leaf[2] != level or not x._requires_grad:
                leaf = _new_leaf(x, array, level)
                if leaf is None:
                    return None
            tensors[i] = leaf[0]
            if inputs[i] is x:  # a Variable, not an array
                leaves[i] = leaf
        elif x._requires_grad and t.is_floating_point():
            keep_history((x,))
            t = tensors[i] = t.detach().requires_grad_()
            leaves[i] = t, None, level
        else:
            if t.requires_grad:
                tensors[i] = t.detach()
            leaves[i] = None, None, level

    f._input_layouts = NO_LAYOUTS[len(variables)]
    if local.get('type_check', global_config.type_check):
        if attributes is None:
            nodes.check_types(f, variables)
        else:
            type_checks.check_signature(f, tuple(signature), variables)
    f._input_indexes_to_retain = f._output_indexes_to_retain = None
    is_recorded = local.get('enable_backprop', global_config.enable_backprop)
    try:
        if is_recorded:
            result = expression(f, *tensors)
        else:
            _set_grad_enabled(False)
            try:
                result = expression(f, *tensors)
            finally:
                _set_grad_enabled(True)
    except Unsupported:
        return None
    except (OptionError, OptionWarning):
        raise
    except Exception as error:  # invalid arguments, for which Chainer raises other errors
        return error

    results = result if type(result) is tuple else (result,)
    outputs = []
    for i, y in enumerate(results):
        dtype = DTYPES.get(y.dtype)
        if dtype is None:  # integers, without type checks: Chainer computes with NumPy
            return None
        data = TensorData()
        data.tensor = y
        data.output = i
        outputs.append(variable_of(data, requires_grad, dtype, tuple(y.shape)))
    f._output_count = len(outputs)
    f._output_layouts = NO_LAYOUTS[len(outputs)]
    if is_recorded:
        f._level = level
        if leaves:
            f._leaves = leaves
        nodes.connect_nodes(f, tuple(of_inputs), rank, variables, outputs)
        f.lazy_grad_sum = local.get('lazy_grad_sum', global_config.lazy_grad_sum)
    return tuple(outputs)


def _new_leaf(x: Variable, array: Any, level: int) -> Leaf | None:
    """Return a tensor without history that shares a Variable's memory; ``None`` if impossible.

    A parameter's tensor is reused.
    """
    if type(array) is not np.ndarray:
        return None
    t = shared(array)
    if t is None:
        return None
    leaf = t, array, level
    if x._requires_grad and t.is_floating_point():
        t.requires_grad_()
        x._node._leaf = leaf
    return leaf


nodes.record = record
chainer._backprop._backprop_to_all = runs.by_runs(chainer._backprop._backprop_to_all)
