"""Gradient compression: what gradients look like on the wire, in fewer bytes.

A compressor is any object with two methods::

    wire = compressor.compress(x, key)
    x = compressor.decompress(wire, size, dtype)

``x`` is a flat NumPy or CuPy array of float16, float32 or float64, which ``compress`` leaves as it
is.  ``wire`` is a new flat array of any dtype that can be exchanged; its dtype and length depend on
``len(x)`` alone.  ``key`` is a string, an integer or a tuple of them that names the stream: a
compressor that remembers something of what it sent remembers it for each key.  It then also has
``serialize(serializer)``, as Chainer's links have, and ``reset()``, which forgets it.

If there is one element on the wire for each value, and it depends on that value alone, an attribute
``elementwise = True`` lets means be compressed too, so that the bytes do not grow with the ranks.

The ranks compare the ``repr`` of their compressors (the name of the class, if the class defines
none), so it should tell the parameters.
"""
from chainermn._gradients.compressors import Bf16, Fp16, TwoBit, describe, get

__all__ = ['Bf16', 'Fp16', 'TwoBit', 'describe', 'get']
