"""Reductions of arrays."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chainermn._collectives.arrays import checked_sequence, packed
from chainermn._collectives.context import Context, MpiCommunicator
from chainermn._collectives.inline_arrays import is_inline, reduced, sum_of
from chainermn._collectives.operation import operation
from chainermn._gradients.parameters import ParameterList
from chainermn._operations import call_signature
from chainermn._operations.call_signature import pack
from chainermn._transport import array_buffers, packing
from chainermn._transport.array_list import ArrayList, map_groups
from chainermn._transport.elementwise import check_op, combined
from chainermn._transport.mpi_transport import LARGE
from chainermn._types import Array, SameArray

#: Dtypes that MPI sums natively.
_NATIVE = {dtype for dtype in call_signature.DTYPES if dtype.kind != 'b' and dtype != np.float16}

_MAX_SUMS = 1024


@operation
def allreduce(comm: MpiCommunicator, x: SameArray, op: str = 'sum', out: SameArray | None = None
              ) -> SameArray:
    context = comm._context
    # Fast paths, for most calls.
    if type(x) is np.ndarray and out is None and type(op) is str and op == 'sum':
        signature = context.inline_sums.get((x.shape, x.dtype))
        if signature is None:
            signature = _sum_signature(context, x)
        if signature:
            blocks = context.check.gather_equal(signature, x.tobytes())
            if blocks is not None:
                return sum_of(blocks, x.shape, x.dtype)
            return _transport_reduced(context, x, op, False)
        if x.dtype in _NATIVE and x.nbytes < LARGE and x.flags.carray:
            context.check.same(pack('allreduce', x.shape, x.dtype, -1, op, False))
            y = np.empty(x.shape, x.dtype)
            context.mpi_comm.Allreduce(x, y)
            return y
    array = array_buffers.checked(x)
    check_op(op, array.dtype)
    signature = packed('allreduce', array, op=op)
    if out is None:
        return _reduced(context, signature, array, op)
    _check_out(out, array)
    target = out if _is_plain(out) else None
    if target is not None and np.may_share_memory(array, target):
        array = target if _same_elements(array, target) else array.copy()
    result = _reduced(context, signature, array, op, target)
    if result is not out:
        (np.asarray(out) if isinstance(out, np.ndarray) else out)[...] = result
    return out


@operation
def allreduce_many(comm: MpiCommunicator, xs: Sequence[SameArray], op: str = 'sum'
                   ) -> tuple[SameArray, ...]:
    context = comm._context
    if not isinstance(xs, (tuple, list)):
        raise TypeError(f'expected a tuple or list of arrays but got {type(xs)}; pass [*xs], '
                        'or call allreduce for a single array')
    arrays = [array_buffers.checked(x) for x in xs]
    for array in arrays:
        check_op(op, array.dtype)
    check_op(op)
    homogeneous = _checked_arrays(context, 'allreduce_many', arrays, op)

    def reduced_group(group: ArrayList) -> Sequence[Array]:
        transport = context.transport_for(group.on_device, homogeneous)
        if op == 'sum' and (sums := transport.sums(group)) is not None:
            return sums
        flat = context.check.prepared(sum(x.nbytes for x in group), lambda: packing.pack(
            group, array_buffers.summed_in(group[0].dtype)))
        return packing.unpacked(_transport_reduced(context, flat, op, homogeneous), group)

    return tuple(map_groups(ArrayList.of(arrays), reduced_group, array_buffers.summed_in))


@operation
def reduce(comm: MpiCommunicator, x: SameArray, op: str = 'sum', root: int = 0) -> SameArray:
    context = comm._context
    root = array_buffers.checked_root(root, context.size)
    array = array_buffers.checked(x)
    check_op(op, array.dtype)
    homogeneous = context.check.same(packed('reduce', array, root, op))
    transport = context.transport_for(array_buffers.on_device(array), homogeneous)
    return combined(array, op, context.check.prepared, transport.reduce, root)


@operation
def reduce_scatter(comm: MpiCommunicator, xs: Array, op: str = 'sum') -> Array:
    context = comm._context
    arrays = checked_sequence(context, xs)
    check_op(op, arrays[0].dtype)
    homogeneous = _checked_arrays(context, 'reduce_scatter', arrays, op)
    sizes = [array.size for array in arrays]
    transport = context.transport_for(array_buffers.on_device(arrays[0]), homogeneous)
    prepared = context.check.prepared
    flat = prepared(sum(array.nbytes for array in arrays), lambda: packing.pack(arrays))
    result = combined(flat, op, prepared, transport.reduce_scatter, sizes)
    return result.reshape(arrays[context.rank].shape)


@operation
def multi_node_mean(comm: MpiCommunicator, x: SameArray) -> SameArray:
    context = comm._context
    array = array_buffers.checked(x)
    if array.dtype.kind != 'f':
        raise TypeError(f'expected a floating-point array but got dtype {array.dtype}; convert it '
                        'first: x.astype(numpy.float32)')
    summed = array.astype(array_buffers.summed_in(array.dtype), copy=False)
    mean = _reduced(context, packed('multi_node_mean', array), summed, 'sum')
    mean *= mean.dtype.type(1 / context.size)
    return mean.astype(array.dtype, copy=False)


def _checked_arrays(context: Context, operation: str, arrays: Sequence[Array], op: str) -> bool:
    """Check that the arrays match on all ranks; return whether their devices match too."""
    listed = ParameterList.named({f'xs[{i}]': array for i, array in enumerate(arrays)})
    layout = listed.layout(allows_mixed_devices=True)
    device = any(array_buffers.on_device(array) for array in arrays)
    return context.check.same(
        pack(operation, op=op, device=device, number=layout.digest), layout.described)


def _sum_signature(context: Context, x: Array) -> bytes:
    """Return the signature of a sum whose data is sent inline; empty for other sums."""
    signature = b''
    if context.check.is_active and x.dtype in _NATIVE and is_inline(context, x):
        signature = pack('allreduce', x.shape, x.dtype, -1, 'sum', False)
    if len(context.inline_sums) >= _MAX_SUMS:
        context.inline_sums.clear()
    context.inline_sums[x.shape, x.dtype] = signature
    return signature


def _reduced(context: Context, signature: bytes, array: Array, op: str, out: Array | None = None
             ) -> Array:
    """Compare the calls, then reduce the arrays of all ranks to an array of the same shape.

    Args:
        context: The context of the communicator.
        signature: The signature of the call, with the shape and device of the array.
        array: The array of this rank.
        op: The reduction, such as ``'sum'``.
        out: C-ordered host array that may receive the result; it may be ``array`` itself.
    """
    if not context.check.is_active or not is_inline(context, array):
        return _transport_reduced(context, array, op, context.check.same(signature), out)
    blocks = context.check.gather_equal(signature, array.tobytes())
    if blocks is None:  # the arrays of other ranks are on devices
        return _transport_reduced(context, array, op, False, out)
    return reduced(blocks, op, array.shape, array.dtype)


def _transport_reduced(context: Context, array: Array, op: str, homogeneous: bool,
                       out: Array | None = None) -> Array:
    """Reduce the arrays of all ranks, after the consistency check.

    Args:
        context: The context of the communicator.
        array: The array of this rank.
        op: The reduction, such as ``'sum'``.
        homogeneous: Whether the arrays are on a device on all ranks or on none.
        out: C-ordered host array that may receive the result; it may be ``array`` itself.
    """
    transport = context.transport_for(array_buffers.on_device(array), homogeneous)
    return combined(array, op, context.check.prepared, transport.allreduce, out)


def _is_plain(x: Array) -> bool:
    """Return whether MPI can write to an array directly."""
    return type(x) is np.ndarray and x.flags.carray


def _same_elements(x: Array, y: Array) -> bool:
    return x.flags.c_contiguous and x.ctypes.data == y.ctypes.data


def _check_out(out: Array, x: Array) -> None:
    if not isinstance(out, np.ndarray) and not array_buffers.on_device(out):
        raise TypeError(f'out must be an array, not {type(out)}')
    if isinstance(out, np.ma.MaskedArray):
        raise TypeError('out must not be a masked array; pass out.data')
    if (out.dtype, out.shape) != (x.dtype, x.shape):
        raise ValueError('out must have the same dtype and shape as the array: expected '
                         f'{x.dtype} {x.shape}, got {out.dtype} {out.shape}')
    if array_buffers.on_device(out) != array_buffers.on_device(x):
        raise ValueError('out and the array must both be on the host, or both on the device; '
                         'move one with chainer.cuda.to_cpu or to_gpu')
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError('out must be a writable array')
