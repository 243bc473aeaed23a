"""Names for the objects of Chainer and CuPy, which have no type hints: the untyped border."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import chainer

if TYPE_CHECKING:
    import numpy as np

#: A ``numpy.ndarray`` or ``cupy.ndarray``.
Array: TypeAlias = Any
#: An array of another rank: a ``numpy.ndarray``, or a ``cupy.ndarray``, or a tuple of these.
ReceivedArray: TypeAlias = 'np.ndarray | Any'
#: A ``chainer.Variable``, ``numpy.ndarray`` or ``cupy.ndarray``.
VariableOrArray: TypeAlias = Any
#: The module ``numpy`` or ``cupy``.
ArrayModule: TypeAlias = Any
Model: TypeAlias = chainer.Link
Parameter: TypeAlias = chainer.Parameter
Variable: TypeAlias = chainer.Variable
#: A ``chainer.Variable``, or a tuple of these.
Variables: TypeAlias = Any
VariableNode: TypeAlias = chainer.variable.VariableNode
FunctionNode: TypeAlias = chainer.FunctionNode
#: A ``chainer.Initializer``, an array or a number.
Initializer: TypeAlias = Any
#: A ``chainer.Optimizer``, or a multi-node optimizer.
Optimizer: TypeAlias = Any
UpdateRule: TypeAlias = chainer.UpdateRule
Serializer: TypeAlias = chainer.AbstractSerializer
#: A data set: an object with ``__len__`` and ``__getitem__``, of Chainer or of the user.
Dataset: TypeAlias = Any
#: A ``chainer.dataset.Iterator``, or an object with the same methods.
DatasetIterator: TypeAlias = Any
#: A ``chainer.backend.Device`` or ``cupy.cuda.Device``.
Device: TypeAlias = Any
#: A ``cupy.cuda.Event``.
DeviceEvent: TypeAlias = Any
#: A ``cupy.cuda.MemoryPointer``, or pinned memory.
DeviceMemory: TypeAlias = Any
#: A ``cupy.ElementwiseKernel`` or ``cupy.ReductionKernel``.
Kernel: TypeAlias = Any
#: A ``cupy.cuda.Stream``.
Stream: TypeAlias = Any
#: An array, or a tuple or list of arrays.
Arrays: TypeAlias = Any
#: A host array or bytes.
Buffer: TypeAlias = 'np.ndarray | bytes | bytearray | memoryview'
#: A ``cupy.cuda.nccl.NcclCommunicator``.
NcclComm: TypeAlias = Any
#: An ``mpi4py.MPI.Intracomm``, for modules that must not import mpi4py.
MpiComm: TypeAlias = Any
#: Any picklable Python object.
Object: TypeAlias = Any
#: ``None``; requests without a result can be in a list with those of received arrays.
NoResult: TypeAlias = Any
#: An attribute of a wrapped object, whose class is not known.
Attribute: TypeAlias = Any
#: A value parsed from JSON.
Json: TypeAlias = Any
