"""Reductions of arrays."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chainermn._collectives.arrays import ArrayOperations, packed
from chainermn._collectives.inline_arrays import reduced, sum_of
from chainermn._collectives.operation import operation
from chainermn._gradients.parameters import ParameterList
from chainermn._operations import call_signature
from chainermn._operations.call_signature import pack
from chainermn._transport import array_buffers, packing
from chainermn._transport.array_list import ArrayList, map_groups
from chainermn._transport.elementwise import check_op, combined
from chainermn._transport.mpi_transport import LARGE
from chainermn._types import Array

#: Dtypes that MPI sums natively.
_NATIVE = {dtype for dtype in call_signature.DTYPES if dtype.kind != 'b' and dtype != np.float16}

_MAX_SUMS = 1024


class ReductionOperations(ArrayOperations):
    """Reductions of a communicator on MPI."""

    #: Signatures of sums that are exchanged inline, by shape and dtype; empty for other sums.
    _sums: dict[tuple[tuple[int, ...], np.dtype], bytes]

    @operation
    def allreduce(self, x: Array, op: str = 'sum', out: Array | None = None) -> Array:
        # Fast paths, for most calls.
        if type(x) is np.ndarray and out is None and type(op) is str and op == 'sum':
            signature = self._sums.get((x.shape, x.dtype))
            if signature is None:
                signature = self._sum_signature(x)
            if signature:
                blocks = self._consistency.gather_equal(signature, x.tobytes())
                if blocks is not None:
                    return sum_of(blocks, x.shape, x.dtype)
                return self._transport_reduced(x, op, False)
            if x.dtype in _NATIVE and x.nbytes < LARGE and x.flags.c_contiguous:
                self._consistency.same(pack('allreduce', x.shape, x.dtype, -1, op, False))
                y = np.empty(x.shape, x.dtype)
                self._arrays.Allreduce(x, y)
                return y
        array = array_buffers.checked(x)
        check_op(op, array.dtype)
        signature = packed('allreduce', array, op=op)
        if out is None:
            return self._reduced(signature, array, op)
        _check_out(out, array)
        target = out if _is_plain(out) else None
        if target is not None and np.may_share_memory(array, target):
            array = target if _same_elements(array, target) else array.copy()
        result = self._reduced(signature, array, op, target)
        if result is not out:
            (np.asarray(out) if isinstance(out, np.ndarray) else out)[...] = result
        return out

    @operation
    def allreduce_many(self, xs: Sequence[Array], op: str = 'sum') -> tuple[Array, ...]:
        if not isinstance(xs, (tuple, list)):
            raise TypeError(f'expected a tuple or list of arrays but got {type(xs)}; pass [*xs], '
                            'or for one array call allreduce')
        arrays = [array_buffers.checked(x) for x in xs]
        for array in arrays:
            check_op(op, array.dtype)
        check_op(op)
        homogeneous = self._checked_arrays('allreduce_many', arrays, op)

        def reduced_group(group: ArrayList) -> Sequence[Array]:
            transport = self._transport_for(group.on_device, homogeneous)
            if op == 'sum' and (sums := transport.sums(group)) is not None:
                return sums
            flat = self._consistency.prepared(sum(x.nbytes for x in group), lambda: packing.pack(
                group, array_buffers.summed_in(group[0].dtype)))
            return packing.unpacked(self._transport_reduced(flat, op, homogeneous), group)

        return tuple(map_groups(ArrayList.of(arrays), reduced_group, array_buffers.summed_in))

    @operation
    def reduce(self, x: Array, op: str = 'sum', root: int = 0) -> Array:
        root = array_buffers.checked_root(root, self.size)
        array = array_buffers.checked(x)
        check_op(op, array.dtype)
        homogeneous = self._consistency.same(packed('reduce', array, root, op))
        transport = self._transport_for(array_buffers.on_device(array), homogeneous)
        return combined(array, op, self._consistency.prepared, transport.reduce, root)

    @operation
    def reduce_scatter(self, xs: Array, op: str = 'sum') -> Array:
        arrays = self._checked_sequence(xs)
        check_op(op, arrays[0].dtype)
        homogeneous = self._checked_arrays('reduce_scatter', arrays, op)
        sizes = [array.size for array in arrays]
        transport = self._transport_for(array_buffers.on_device(arrays[0]), homogeneous)
        prepared = self._consistency.prepared
        flat = prepared(sum(array.nbytes for array in arrays), lambda: packing.pack(arrays))
        result = combined(flat, op, prepared, transport.reduce_scatter, sizes)
        return result.reshape(arrays[self.rank].shape)

    @operation
    def multi_node_mean(self, x: Array) -> Array:
        array = array_buffers.checked(x)
        if array.dtype.kind != 'f':
            raise TypeError(f'expected a floating-point array but got {array.dtype}; pass '
                            'x.astype(numpy.float32)')
        summed = array.astype(array_buffers.summed_in(array.dtype), copy=False)
        mean = self._reduced(packed('multi_node_mean', array), summed, 'sum')
        mean *= mean.dtype.type(1 / self.size)
        return mean.astype(array.dtype, copy=False)

    def _checked_arrays(self, operation: str, arrays: Sequence[Array], op: str) -> bool:
        """Check that arrays match on all ranks; return whether their devices do too."""
        listed = ParameterList.named({f'xs[{i}]': array for i, array in enumerate(arrays)})
        layout = listed.layout(allows_mixed_devices=True)
        device = any(array_buffers.on_device(array) for array in arrays)
        return self._consistency.same(
            pack(operation, op=op, device=device, number=layout.digest), layout.described)

    def _sum_signature(self, x: Array) -> bytes:
        """Return the signature of a sum that is exchanged inline; empty for others."""
        signature = b''
        if self._consistency.is_active and x.dtype in _NATIVE and self._is_inline(x):
            signature = pack('allreduce', x.shape, x.dtype, -1, 'sum', False)
        if len(self._sums) >= _MAX_SUMS:
            self._sums.clear()
        self._sums[x.shape, x.dtype] = signature
        return signature

    def _reduced(self, signature: bytes, array: Array, op: str, out: Array | None = None) -> Array:
        """Compare the calls, and reduces the arrays of all ranks, in the shape of this one.

        Args:
            signature: The signature of the call, with the shape and device of the array.
            array: Array.
            op: The operation.
            out: C-ordered host array that may receive the result; it may be ``array`` itself.
        """
        if not self._consistency.is_active or not self._is_inline(array):
            return self._transport_reduced(array, op, self._consistency.same(signature), out)
        blocks = self._consistency.gather_equal(signature, array.tobytes())
        if blocks is None:  # the arrays of other ranks are on devices
            return self._transport_reduced(array, op, False, out)
        return reduced(blocks, op, array.shape, array.dtype)

    def _transport_reduced(self, array: Array, op: str, homogeneous: bool, out: Array | None = None
                           ) -> Array:
        """Reduce the arrays of all ranks, after the consistency check.

        Args:
            array: Array.
            op: The operation.
            homogeneous: Whether the arrays are on a device on all ranks or on none.
            out: C-ordered host array that may receive the result; it may be ``array`` itself.
        """
        transport = self._transport_for(array_buffers.on_device(array), homogeneous)
        return combined(array, op, self._consistency.prepared, transport.allreduce, out)


def _is_plain(x: Array) -> bool:
    """Whether MPI can write to an array directly."""
    return type(x) is np.ndarray and x.flags.c_contiguous


def _same_elements(x: Array, y: Array) -> bool:
    return x.flags.c_contiguous and x.ctypes.data == y.ctypes.data


def _check_out(out: Array, x: Array) -> None:
    if not isinstance(out, np.ndarray) and not array_buffers.on_device(out):
        raise TypeError(f'out must be an array, not {type(out)}')
    if isinstance(out, np.ma.MaskedArray):
        raise TypeError('out must not be a masked array; pass out.data')
    if (out.dtype, out.shape) != (x.dtype, x.shape):
        raise ValueError(f'out must have the dtype and shape of the array, {x.dtype} {x.shape}, '
                         f'not {out.dtype} {out.shape}')
    if array_buffers.on_device(out) != array_buffers.on_device(x):
        raise ValueError('out and the array must both be on the host, or both on the device')
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError('out is read-only')
