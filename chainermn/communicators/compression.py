"""Gradient compression: encodes gradients in fewer bytes before they are sent.

A compressor is any object with two methods::

    encoded = compressor.compress(x, key)
    x = compressor.decompress(encoded, size, dtype)

``x`` is a flat NumPy or CuPy array of float16, float32 or float64, which ``compress`` must not
modify. ``encoded`` is a new flat array of any dtype that communicators can send; its dtype and
length depend on ``len(x)`` only. ``key`` identifies the data: a string, an integer or a tuple of
these, such as the path and the size of each gradient in ``x``.

A compressor with state, such as error feedback, keeps a separate state for each key. It also has
``serialize(serializer)``, like a Chainer link, and ``reset()``, which discards the state. If there
is a loss scale, such a compressor gets gradients without the scale, in float32 or float64. If the
compressor also has ``commit()`` and ``rollback(paths=None)``, like :class:`TwoBit`, the optimizer
reverts the changes of the state in a step that was skipped or failed.

If a method raises an error on one rank, the same error is raised on all ranks, and the gradients
are invalid. With overlap and NCCL, the error is only raised on that rank.

The state belongs to one model. If two multi-node optimizers get the same compressor, the second
optimizer uses a copy. If you call ``multi_node_mean_grad(model, compression=...)`` for several
models, create a compressor for each model.

An attribute ``elementwise = True`` declares that each value is encoded as one element,
independently of the other values. Then means are also compressed, so the number of bytes per rank
does not grow with the number of ranks. ``encoded_dtype = 'float16'`` or ``'bfloat16'`` declares
that NCCL can sum encoded arrays.

If a compressor has the attribute ``encoded_type`` (the dtype of encoded arrays) and a method
``encoded_length(size)``, ``flat`` averages the gradients within each node first and encodes only
data that it sends to other nodes.

:class:`PowerSGD` does not have these methods, because it averages matrices as products of low-rank
factors.

The ranks compare the ``repr`` of their compressors (the class name by default), so ``repr`` should
show the parameters of the compressor.
"""
from typing import TYPE_CHECKING

from chainermn._gradients.compressors import Bf16, Fp16, PowerSGD, TwoBit, describe, get

if TYPE_CHECKING:  # importing it at run time would import mpi4py
    from chainermn._transport.base import Compressor as Compressor

__all__ = ['Bf16', 'Fp16', 'PowerSGD', 'TwoBit', 'describe', 'get']
