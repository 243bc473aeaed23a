"""Type aliases for NumPy, CuPy and Chainer; NumPy and CuPy are imported by type checkers only.

Type checkers treat the classes of Chainer and CuPy as ``Any``, because they have no type hints.
"""
from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import chainer

if TYPE_CHECKING:
    import cupy
    import numpy as np

Array: TypeAlias = 'np.ndarray | cupy.ndarray'
DeviceArray: TypeAlias = 'cupy.ndarray'
#: An array of the same class as an argument; see ``CommunicatorBase`` for which argument.
SameArray: TypeAlias = Any
#: An array, or a tuple or list of arrays.
Arrays: TypeAlias = 'Array | Sequence[Array]'
#: The data that another rank sent: an array or a tuple of arrays.
ReceivedArrays: TypeAlias = 'Array | Any'
#: The module ``numpy`` or ``cupy``.
ArrayModule: TypeAlias = ModuleType
#: A host array or bytes.
Buffer: TypeAlias = 'np.ndarray | bytes | bytearray | memoryview'

Model: TypeAlias = chainer.Link
Parameter: TypeAlias = chainer.Parameter
Variable: TypeAlias = chainer.Variable
#: A variable or a tuple of variables.
Variables: TypeAlias = 'Variable | Any'
VariableOrArray: TypeAlias = 'Variable | Array'
VariableNode: TypeAlias = chainer.variable.VariableNode
FunctionNode: TypeAlias = chainer.FunctionNode
Initializer: TypeAlias = 'chainer.Initializer | Array | float'
Optimizer: TypeAlias = chainer.Optimizer
UpdateRule: TypeAlias = chainer.UpdateRule
Serializer: TypeAlias = chainer.AbstractSerializer
DatasetIterator: TypeAlias = chainer.dataset.Iterator

Device: TypeAlias = 'chainer.backend.Device | cupy.cuda.Device'
DeviceEvent: TypeAlias = 'cupy.cuda.Event'
DeviceMemory: TypeAlias = 'cupy.cuda.MemoryPointer | cupy.cuda.PinnedMemoryPointer'
Kernel: TypeAlias = 'cupy.ElementwiseKernel | cupy.ReductionKernel'
Stream: TypeAlias = 'cupy.cuda.Stream'
NcclComm: TypeAlias = 'cupy.cuda.nccl.NcclCommunicator'

#: Any picklable Python object.
Object: TypeAlias = Any


class Dataset(Protocol):
    """Any dataset with a length and items, from Chainer or from user code."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Any: ...
