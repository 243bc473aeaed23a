"""Names for the objects of Chainer and CuPy, which have no type hints: the untyped border."""
from __future__ import annotations

from typing import Any, TypeAlias

#: A ``numpy.ndarray`` or ``cupy.ndarray``.
Array: TypeAlias = Any
#: A ``chainer.Variable``, ``numpy.ndarray`` or ``cupy.ndarray``.
VariableOrArray: TypeAlias = Any
#: The module ``numpy`` or ``cupy``.
ArrayModule: TypeAlias = Any
#: A ``chainer.Link``.
Model: TypeAlias = Any
#: A ``chainer.Parameter``.
Parameter: TypeAlias = Any
#: A ``chainer.Variable``.
Variable: TypeAlias = Any
#: A ``chainer.variable.VariableNode``.
VariableNode: TypeAlias = Any
#: A ``chainer.FunctionNode``.
FunctionNode: TypeAlias = Any
#: A ``chainer.Initializer``, an array or a number.
Initializer: TypeAlias = Any
#: A ``chainer.Optimizer``, or a multi-node optimizer.
Optimizer: TypeAlias = Any
#: A ``chainer.UpdateRule``.
UpdateRule: TypeAlias = Any
#: A ``chainer.AbstractSerializer``.
Serializer: TypeAlias = Any
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
#: What MPI sends from or receives into: an array, bytes, or a part of a pickle.
Buffer: TypeAlias = Any
#: A ``cupy.cuda.nccl.NcclCommunicator``.
NcclComm: TypeAlias = Any
#: An ``mpi4py.MPI.Intracomm``, for modules that must not import mpi4py.
MpiComm: TypeAlias = Any
#: Any picklable Python object.
Object: TypeAlias = Any
#: An attribute of a wrapped object, whose class is not known.
Attribute: TypeAlias = Any
#: A value parsed from JSON.
Json: TypeAlias = Any
