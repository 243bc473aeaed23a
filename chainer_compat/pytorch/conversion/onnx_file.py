"""``to_onnx``: write a converted module to an ONNX file, and check it with ONNX Runtime."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chainer
import numpy as np
import torch

from chainer_compat.pytorch.conversion.batch_size import batch_size, varied
from chainer_compat.pytorch.conversion.comparison import ROUNDING, difference
from chainer_compat.pytorch.conversion.convert import converted
from chainer_compat.pytorch.conversion.errors import ConversionError, showing_user_code
from chainer_compat.pytorch.conversion.module_runs import as_array, tensors
from chainer_compat.pytorch.conversion.patches import on_one_rank
from chainer_compat.pytorch.conversion.references import flattened, mapped
from chainer_compat.pytorch.conversion.tracing import Trace
from chainer_compat.pytorch.expressions.noise import DRAWN

Inputs = tuple[Any, ...]

#: ONNX Runtime fuses and reorders operations, so its rounding differs more than PyTorch's.
TOLERANCE = 50.


@showing_user_code
@on_one_rank()
def to_onnx(model: chainer.Link, path: str | os.PathLike[str], *inputs: Any,
            dynamic_batch: bool | None = None, call: Callable[..., Any] | None = None,
            opset_version: int | None = None) -> None:
    """Write a Chainer model to an ONNX file, for inference.

    The model is converted by :func:`to_torch` and exported by ``torch.onnx``. ONNX Runtime then
    runs the file with the example inputs and with different inputs, including different batch sizes
    if they are allowed. The file is only kept if all outputs match Chainer's, except for rounding.

    Args:
        model: A Chainer model on the CPU.
        path: The file.
        inputs: Example inputs: NumPy arrays, variables, numbers, lists, tuples and dicts of them.
        dynamic_batch: Whether the file accepts any batch size, which is the length of the first
            array. ``None`` means that it does if the model does; otherwise, there is a warning.
        call: Function to run instead of ``model``, such as ``model.predict``.
        opset_version: The ONNX operator set version. If not given, ``torch.onnx`` chooses it.

    Raises:
        ConversionError: If the model cannot be converted, or if outputs differ. Then no file is
            written.
        ImportError: If onnx, onnxscript or onnxruntime are not installed.
        FileNotFoundError: If the folder of ``path`` does not exist.
        TypeError: If ``path`` is not a path.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f'to_onnx: path must be the path of a file, not {type(path).__name__}. The '
                        "order of the arguments is to_onnx(model, 'model.onnx', x).")
    for name in 'onnx', 'onnxscript', 'onnxruntime':
        _require(name)
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f'to_onnx: the folder {path.parent} does not exist. Create it '
                                'first.')
    size = batch_size(inputs)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        file = Path(folder, 'model.onnx')
        try:
            is_dynamic = _write(model, file, inputs, dynamic_batch, call, opset_version)
        except ConversionError:
            if dynamic_batch is not None or size is None:
                raise
            is_dynamic = _write(model, file, inputs, False, call, opset_version)
        if not is_dynamic and dynamic_batch is None and size is not None:
            warnings.warn('The file accepts only the shapes of the example inputs. '
                          'Pass dynamic_batch=True to see why.', stacklevel=4)
        os.replace(file, path)


def _write(model: chainer.Link, file: Path, inputs: Inputs, dynamic_batch: bool | None,
           call: Callable[..., Any] | None, opset_version: int | None) -> bool:
    """Write and check a file; return whether it accepts any batch size."""
    module, runs = converted(
        "to_onnx(model, 'model.onnx', x)", model, inputs, False, dynamic_batch, call, False)
    _check_file_is_possible(runs[0])
    size = batch_size(inputs) if module.meta['chainer_batch'] else None
    more = None if size is None else size + 3  # not 1, which could mean broadcasting
    _export(module, next(iter(varied(inputs, size, more))), file, more, opset_version)
    _check(file, runs)
    return size is not None


def _check_file_is_possible(run: Trace) -> None:
    for call in run.needed():
        if call.name in DRAWN:
            raise ConversionError(f'{call.label} draws random numbers, so the file could not be '
                                  'compared with the model. Use call= to convert a function that '
                                  'draws none.')
    for y in flattened(run.variables):
        if y is not None and not isinstance(y, np.ndarray | chainer.Variable):
            raise ConversionError(f'Outputs of an ONNX file are arrays, but the model returns {y}. '
                                  'Use call= to convert a function that returns arrays.')


def _require(name: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f'to_onnx needs {name} ({error}): pip install onnx onnxscript onnxruntime'
                          ) from error


def _export(module: torch.nn.Module, inputs: Inputs, file: Path, size: int | None,
            opset_version: int | None) -> None:
    batch = torch.export.Dim('batch') if size else None

    def shape(value: Any) -> Any:
        if batch is not None and torch.is_tensor(value) and value.ndim and len(value) == size:
            return {0: batch}
        return None

    arguments = tensors(inputs)
    try:
        with warnings.catch_warnings(), _without_logging():
            warnings.simplefilter('ignore')  # PyTorch warns about its own code
            program = torch.onnx.export(
                module, (*arguments, {}), dynamo=True, verbose=False,  # {}: no keyword arguments
                opset_version=opset_version,
                dynamic_shapes=tuple(mapped(each, shape) for each in arguments) if size else None)
            program.save(file, external_data=False)
    except Exception as error:  # raised by torch.export and onnxscript, which have many classes
        cause = str(error.__cause__ or error).strip().split('\n')[0]
        raise ConversionError(
            f'torch.onnx cannot export the converted module: {cause}') from error


@contextlib.contextmanager
def _without_logging() -> Iterator[None]:
    """Suppress warnings that do not concern the model, such as warnings about torchvision."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(previous)


def _check(file: Path, runs: list[Trace]) -> None:
    """Compare the outputs of ONNX Runtime with Chainer's."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(
            file.read_bytes(), options, providers=['CPUExecutionProvider'])
        names = [each.name for each in session.get_inputs()]
        found = [_outputs(session, names, run) for run in runs]
    except ConversionError:
        raise
    except Exception as error:  # raised by ONNX Runtime
        raise ConversionError(f'ONNX Runtime cannot run the file: {error}') from error
    for run, outputs in zip(runs, found, strict=True):
        expected = [as_array(y) for y in flattened(run.variables) if y is not None]
        for i, (output, value) in enumerate(zip(outputs, expected, strict=True)):
            relative = difference(output, value)
            if relative > TOLERANCE * ROUNDING.get(value.dtype.name, 0.):
                raise ConversionError(
                    f'Output {i} of the ONNX file differs from the model by '
                    f'{relative:.1e}, relative to its largest element.')


def _outputs(session: Any, names: list[str], run: Trace) -> list[Any]:
    arrays = [as_array(x) for x in flattened(run.inputs)
              if isinstance(x, np.ndarray | chainer.Variable)]
    if len(names) != len(arrays):
        raise ConversionError(f'The ONNX file has the inputs {", ".join(names)}, but the model has '
                              f'{len(arrays)} arrays as inputs, some of which it does not use. Use '
                              'call= to convert a function without these inputs.')
    return list(session.run(None, dict(zip(names, arrays, strict=True))))
