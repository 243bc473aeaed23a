"""The operations that combine arrays, after the agreement."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from chainermn import _signature
from chainermn._collectives.arrays import ArrayOperations, packed
from chainermn._collectives.operation import collective
from chainermn._signature import pack
from chainermn._transport import array_buffers, packing
from chainermn._transport.elementwise import check_op, combined
from chainermn._transport.mpi import LARGE

#: What MPI adds as it is.
_AS_IS = {dtype for dtype in _signature.DTYPES if dtype.kind != 'b' and dtype != np.float16}


class ReductionOperations(ArrayOperations):
    """The part of a communicator on MPI that combines arrays."""

    @collective
    def allreduce(self, x: Any, op: str = 'sum', out: Any = None) -> Any:
        if type(x) is np.ndarray and x.dtype in _AS_IS and out is None and op == 'sum' and (
                x.nbytes < LARGE and x.flags.c_contiguous):  # the shortest way, for most calls
            if self._agreement.is_active:
                self._agreement.same(pack('allreduce', x.shape, x.dtype, -1, op, False))
            else:
                calls = self._agreement.calls
                calls.count += 1
                calls.ring.append('allreduce')
            y = np.empty(x.shape, x.dtype)
            self._arrays.Allreduce(x, y)
            return y
        try:
            array = array_buffers.checked(x)
            check_op(op, array.dtype)
            if out is not None:
                _check_out(out, array)
        except Exception as error:
            self.refuse('allreduce', error)
        alike = self._agreement.same(packed('allreduce', array, op=op))
        if out is None:
            return self._reduced(array, op, alike)
        target = out if _is_plain(out) else None
        if target is not None and np.may_share_memory(array, target):
            array = target if _same_elements(array, target) else array.copy()
        result = self._reduced(array, op, alike, target)
        if result is not out:
            out[...] = result
        return out

    @collective
    def allreduce_many(self, xs: Sequence[Any], op: str = 'sum') -> tuple[Any, ...]:
        try:
            if not isinstance(xs, (tuple, list)):
                raise TypeError(f'expected a tuple or list of arrays but got {type(xs)}')
            arrays = [array_buffers.checked(x) for x in xs]
            for array in arrays:
                check_op(op, array.dtype)
            check_op(op)
        except Exception as error:
            self.refuse('allreduce_many', error)
        alike = self._agreed_arrays('allreduce_many', arrays, op)
        groups: dict[Any, list[int]] = {}
        for i, array in enumerate(arrays):
            key = array_buffers.summed_in(array.dtype), array_buffers.on_device(array)
            groups.setdefault(key, []).append(i)
        results: list[Any] = [None] * len(arrays)
        for (dtype, device), members in groups.items():
            group = [arrays[i] for i in members]
            sums = self._transport(device, alike).sums(group) if op == 'sum' else None
            if sums is not None:
                for i, total in zip(members, sums, strict=True):
                    results[i] = total
                continue
            reduced = self._reduced(packing.pack(group, dtype), op, alike)
            start = 0
            for i, array in zip(members, group, strict=True):
                piece = reduced[start:start + array.size].reshape(array.shape)
                with np.errstate(over='ignore'):
                    results[i] = piece.astype(array.dtype, copy=False)
                start += array.size
        return tuple(results)

    @collective
    def reduce(self, x: Any, op: str = 'sum', root: int = 0) -> Any:
        try:
            root = array_buffers.checked_root(root, self.size)
            array = array_buffers.checked(x)
            check_op(op, array.dtype)
        except Exception as error:
            self.refuse('reduce', error)
        alike = self._agreement.same(packed('reduce', array, root, op))
        transport = self._transport(array_buffers.on_device(array), alike)
        return combined(array, op, transport.reduce, root)

    @collective
    def reduce_scatter(self, xs: Any, op: str = 'sum') -> Any:
        try:
            arrays = self._checked_sequence(xs)
            check_op(op, arrays[0].dtype)
        except Exception as error:
            self.refuse('reduce_scatter', error)
        alike = self._agreed_arrays('reduce_scatter', arrays, op)
        sizes = [array.size for array in arrays]
        transport = self._transport(array_buffers.on_device(arrays[0]), alike)
        result = combined(packing.pack(arrays), op, transport.reduce_scatter, sizes)
        return result.reshape(arrays[self.rank].shape)

    @collective
    def multi_node_mean(self, x: Any) -> Any:
        try:
            array = array_buffers.checked(x)
            if array.dtype.kind != 'f':
                raise TypeError(f'the mean is of floating-point arrays, not {array.dtype}')
        except Exception as error:
            self.refuse('multi_node_mean', error)
        alike = self._agreement.same(packed('multi_node_mean', array))
        summed = array.astype(array_buffers.summed_in(array.dtype), copy=False)
        mean = self._reduced(summed, 'sum', alike)
        mean *= mean.dtype.type(1 / self.size)
        return mean.astype(array.dtype, copy=False)

    def _agreed_arrays(self, verb: str, arrays: Sequence[Any], op: str) -> bool:
        """Agrees on several arrays; says whether all ranks have them in the same places."""
        described = packing.describe({f'xs[{i}]': array for i, array in enumerate(arrays)})
        device = any(array_buffers.on_device(array) for array in arrays)
        return self._agreement.same(
            pack(verb, op=op, device=device, number=_signature.digest(described)), described)

    def _reduced(self, array: Any, op: str, alike: bool, out: Any = None) -> Any:
        """The arrays of all ranks, combined, in the shape of this one.

        Args:
            array: Array.
            op: The operation.
            alike: Whether the arrays are on a device on all ranks or on none.
            out: C-ordered host array where the result may be put; it may be ``array`` itself.
        """
        transport = self._transport(array_buffers.on_device(array), alike)
        return combined(array, op, transport.allreduce, out)


def _is_plain(x: Any) -> bool:
    """Whether MPI can write to an array as it is."""
    return isinstance(x, np.ndarray) and x.flags.c_contiguous


def _same_elements(x: Any, y: Any) -> bool:
    return x.flags.c_contiguous and x.ctypes.data == y.ctypes.data


def _check_out(out: Any, x: Any) -> None:
    if not isinstance(out, np.ndarray) and not array_buffers.on_device(out):
        raise TypeError(f'out has to be an array, not {type(out)}')
    if (out.dtype, out.shape) != (x.dtype, x.shape):
        raise ValueError(f'out has to be as the array, {x.dtype} {x.shape}, but is {out.dtype} '
                         f'{out.shape}')
    if array_buffers.on_device(out) != array_buffers.on_device(x):
        raise ValueError('out and the array have to be both on the host or both on the device')
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError('out is read-only')
