"""Runs the C++ of CuPy's elementwise and reduction kernels on NumPy arrays.

A compiler for the host compiles the expressions, for the dtypes with which a kernel is called.
"""

import ctypes

import numpy as np
from host_compiler import library

C_TYPES = {'e': '_Float16', 'f': 'float', 'd': 'double', 'i': 'int', 'l': 'long long'}


class Parameter:
    """One of ``'raw W table, int32 n'``."""

    def __init__(self, text):
        *kinds, self.type, self.name = text.split()
        self.is_raw = kinds == ['raw']

    @property
    def dtype(self):
        """The dtype, ``None`` for a type that depends on the arguments."""
        return None if len(self.type) == 1 else np.dtype(self.type)


def parameters(text):
    return [Parameter(part.strip()) for part in text.split(',')]


class ElementwiseKernel:
    """Stands in for ``cupy.ElementwiseKernel``; writes to the given outputs."""

    def __init__(self, inputs, outputs, operation, name):
        self.inputs, self.outputs = parameters(inputs), parameters(outputs)
        self.operation, self.name = operation, name

    def __call__(self, *args):
        params = [*self.inputs, *self.outputs]
        args = [np.asarray(x, param.dtype) for x, param in zip(args, params, strict=True)]
        types = {param.type: x.dtype for x, param in zip(args, params, strict=True)}
        shape = np.broadcast_shapes(
            *(x.shape for x, param in zip(args, params, strict=True) if not param.is_raw))
        for x, param in zip(args, params, strict=True):
            assert x.dtype == types[param.type], f'{param.name}: {x.dtype}, {types}'
        memory = [np.array(x if param.is_raw else np.broadcast_to(x, shape), order='C')
                  for x, param in zip(args, params, strict=True)]
        n = int(np.prod(shape))
        run = library(self.source(params, types)).run
        run(ctypes.c_longlong(n), *(ctypes.c_void_p(x.ctypes.data) for x in memory))
        for x, y in list(zip(args, memory, strict=True))[len(self.inputs):]:
            x[...] = y

    def source(self, params, types):
        lines = [f'typedef {C_TYPES[dtype.char]} {name};'
                 for name, dtype in types.items()]
        lines += ['struct Size { long long n; long long size() const { return n; } };',
                  'extern "C" void run(long long n, ' + ', '.join(
                      f'{p.type}* {p.name}{"" if p.is_raw else "_"}' for p in params) + ') {',
                  'const Size _ind{n};',
                  'for (long long i = 0; i < n; ++i) {']
        lines += [f'{p.type}& {p.name} = {p.name}_[i];' for p in params if not p.is_raw]
        return '\n'.join([*lines, f'{self.operation};', '}}', ''])


class ReductionKernel:
    """Stands in for ``cupy.ReductionKernel``, for sums."""

    def __init__(self, inputs, output, map_expr, reduce_expr, post_map_expr, identity, name):
        self.output, = parameters(output)
        assert (reduce_expr, post_map_expr, identity) == ('a + b', f'{self.output.name} = a', '0')
        self.map = ElementwiseKernel(
            inputs, output, f'{self.output.name} = {map_expr}', name)
        self.name = name

    def __call__(self, *args, axis, out):
        terms = np.empty(np.broadcast_shapes(*(np.shape(x) for x in args)), out.dtype)
        self.map(*args, terms)
        terms.sum(axis=axis, out=out)
