"""Gradient compression: encodes gradients in fewer bytes for the exchange.

A compressor is any object with two methods::

    encoded = compressor.compress(x, key)
    x = compressor.decompress(encoded, size, dtype)

``x`` is a flat NumPy or CuPy array of float16, float32 or float64, which ``compress`` must not
modify. ``encoded`` is a new flat array of any dtype that can be exchanged; its dtype and length
depend on ``len(x)`` only. ``key`` identifies what is encoded: a string, an integer or a tuple of
these, such as the path and the size of each gradient in ``x``. A compressor with state, such as
error feedback, keeps it per key. It also has ``serialize(serializer)``, like a Chainer link, and
``reset()``, which drops the state. It gets gradients without the loss scale, in float32 or float64
if there is one. If it also has ``commit()`` and ``rollback(paths=None)``, like :class:`TwoBit`,
the optimizer takes back what was encoded for a step that was skipped or has failed. If a method
raises an error on one rank, the same error is raised on all ranks, and the gradients are invalid;
with overlap on NCCL, it is only raised on that rank.

The state belongs to one model. If two multi-node optimizers get the same compressor, the second
one uses a copy. If you call ``multi_node_mean_grad(model, compression=...)`` for several models,
create a compressor for each.

An attribute ``elementwise = True`` declares that each value is encoded as one element,
independently of the others. Then means are compressed too, and the bytes per rank do not grow with
the number of ranks. ``encoded_dtype = 'float16'`` or ``'bfloat16'`` declares that NCCL can add
encoded arrays.

With ``encoded_type``, the dtype of encoded arrays, and a method ``encoded_length(size)``, ``flat``
averages the gradients of each node first, and encodes only parts that it sends to other nodes.

:class:`PowerSGD` does not have these methods: it averages matrices as products of thin matrices.

The ranks compare the ``repr`` of their compressors (the class name by default), so it should show
the parameters.
"""
from typing import TYPE_CHECKING

from chainermn._gradients.compressors import Bf16, Fp16, PowerSGD, TwoBit, describe, get

if TYPE_CHECKING:  # importing it at run time would import mpi4py
    from chainermn._transport.base import Compressor as Compressor

__all__ = ['Bf16', 'Fp16', 'PowerSGD', 'TwoBit', 'describe', 'get']
