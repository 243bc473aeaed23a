"""A stand-in for a GPU: CuPy on NumPy, NCCL on MPI, and the kernels compiled for the host.

The caller's stream runs everything at once.  So do other streams, or, with ``gpu.late``, they run
nothing until somebody waits for them: the earliest and the latest that a device may take.  The
stand-in shows what is called, on which stream, and with which result.  It fails a test in which
another stream reads memory that nobody holds any more, in which MPI is given device memory while
the device is still at work, and in which a thread uses a device that is not its current one.
"""

import ctypes
import functools
import platform
import sys
import threading
import types
from collections import deque

import chainer
import kernels_on_host
import numpy as np
import pytest
from host_compiler import library
from mpi4py import MPI

from chainermn import nccl
from chainermn._transport import batched_copy
from chainermn.communicators.compression import Bf16
from chainermn.functions import _batch_norm_on_device

# What the kernels need of CUDA, for one thread of a host that runs them one after the other.
CUDA = r'''
#include <immintrin.h>
#define __global__
#define __device__
struct __half { unsigned short bits; };
static inline float __half2float(__half x) { return _cvtsh_ss(x.bits); }
static inline __half __float2half_rn(float x) { return {_cvtss_sh(x, 0)}; }
static inline __half __double2half(double x) { return __float2half_rn((float)x); }
static struct { int x; } blockIdx, threadIdx, blockDim;
'''
RUN = r'''
extern "C" void run(int name, int blocks, int threads, const Piece* pieces, Element* buffer,
                    double scale) {
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
            if (name) unpack(pieces, buffer, scale); else pack(pieces, buffer, scale);
}
'''


INCLUDE = '#include <cuda_fp16.h>'


@pytest.fixture(scope='session')
def compile_kernels():
    """Compiles kernels for the host: ``run(name, blocks, threads, pieces, buffer, scale)``."""
    if platform.machine() != 'x86_64':
        pytest.skip('needs x86-64')

    def compile_kernels(source):
        assert INCLUDE in source
        run = library(source.replace(INCLUDE, CUDA) + RUN, '-mf16c').run
        return lambda name, blocks, threads, pieces, buffer, scale=1.: run(
            name == 'unpack', blocks, threads, ctypes.c_void_p(pieces.ctypes.data),
            ctypes.c_void_p(buffer.ctypes.data), ctypes.c_double(scale))
    return compile_kernels


class Array(np.ndarray):
    """Stands in for ``cupy.ndarray``: operations are queued on the current stream."""

    gpu = None

    @property
    def data(self):
        self.gpu.streams[-1].touch(self)
        return types.SimpleNamespace(ptr=self.ctypes.data, device_id=0)

    @property
    def device(self):
        return Device(0)

    def get(self):
        self.gpu.streams[-1].synchronize()
        return np.array(self)

    def set(self, x):
        self[...] = np.array(x)

    def copy(self, order='C'):
        return self.gpu.made(lambda: plain(self).copy(order))

    def astype(self, dtype, order='K', casting='unsafe', subok=True, copy=True):
        if not copy and self.dtype == dtype:
            return self
        return self.gpu.made(lambda: plain(self).astype(dtype))

    def take(self, indices, axis=None):
        return self.gpu.made(lambda: plain(self).take(plain(indices), axis))

    def __setitem__(self, key, value):
        self.gpu.do(lambda: plain(self).__setitem__(plain(key), plain(value)))

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **options):
        def call():
            return getattr(ufunc, method)(*plain(inputs), **plain(options), **(
                {'out': plain(out)} if out else {}))

        if not out:
            return self.gpu.made(call)
        self.gpu.do(call)
        return out[0] if len(out) == 1 else out


def plain(x):
    """The same memory as NumPy's arrays."""
    if isinstance(x, (tuple, list)):
        return type(x)(map(plain, x))
    if isinstance(x, dict):
        return {key: plain(value) for key, value in x.items()}
    return x.view(np.ndarray) if isinstance(x, Array) else x


def owner(array):
    """The array that owns the memory of a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def reference_counts(table):
    """What Python says of each value; the number for the same references depends on its version."""
    return [sys.getrefcount(value) for value in table.values()]


# Of memory that only the table refers to.
UNREFERENCED, = reference_counts({0: np.empty(1)})


class Gpu:
    """The stand-in, with a log of operations by stream."""

    def __init__(self, compile_kernels):
        self.log = []
        self.late = False
        self.all_streams = []
        self.streams = [Stream(self, 'caller')]  # the last one is current
        self.wrong = []  # what no program may do
        self.nccl_error = None
        self.nccl_communicators = []
        cuda = types.SimpleNamespace(
            Device=Device, Event=Event, Stream=lambda non_blocking: Stream(self, 'own'),
            get_current_stream=lambda: self.streams[-1],
            runtime=types.SimpleNamespace(
                getDeviceCount=lambda: 1, eventQuery=Event.query, CUDARuntimeError=CudaError))
        self.cupy = types.ModuleType('cupy')
        self.cupy.__dict__.update(
            __getattr__=self.function, cuda=cuda, ndarray=Array,
            may_share_memory=np.may_share_memory,
            copyto=lambda *args, **options: self.do(
                lambda: np.copyto(*plain(args), **plain(options))),
            ascontiguousarray=self.ascontiguousarray, empty=self.empty,
            asarray=self.asarray, asnumpy=self.asnumpy,
            get_array_module=lambda *xs: (
                self.cupy if any(isinstance(x, Array) for x in xs) else np),
            ElementwiseKernel=lambda *args: self.simple_kernel(
                kernels_on_host.ElementwiseKernel(*args)),
            ReductionKernel=lambda *args: self.simple_kernel(
                kernels_on_host.ReductionKernel(*args)),
            RawModule=lambda code: types.SimpleNamespace(
                get_function=lambda name: self.kernel(compile_kernels(code), name)))
        self.cupyx = types.SimpleNamespace(empty_pinned=np.empty)

    def function(self, name):
        """NumPy's function of that name, queued on the current stream."""
        found = getattr(np, name)
        if isinstance(found, (type, np.ufunc)) or not callable(found):
            return found
        return lambda *args, **options: self.made(lambda: found(*plain(args), **plain(options)))

    def ascontiguousarray(self, x, dtype=None):
        if x.flags.c_contiguous and x.dtype == (dtype or x.dtype):
            return x
        return self.made(lambda: np.ascontiguousarray(plain(x), dtype))

    def empty(self, shape, dtype):
        """Memory of the pool, which queued work may still be using."""
        return self.made(lambda: np.full(shape, 77, dtype))

    def asarray(self, x):
        if isinstance(x, Array):
            return x
        x = np.array(x)
        return self.made(x.copy)

    def asnumpy(self, x, out):
        self.streams[-1].synchronize()
        out[...] = plain(x)
        return out

    def made(self, call):
        """Returns a new array, computed when the current stream reaches it."""
        stream, result = self.streams[-1], call()
        if not isinstance(result, np.ndarray):
            return result
        stream.pending = True
        if not stream.is_late:
            return result.view(Array)
        memory = np.full_like(result, 77)
        stream.own.append(memory)
        stream.work.append(lambda: np.copyto(memory, call()))
        return memory.view(Array)

    def do(self, call):
        """Runs a function that changes arrays when the current stream reaches it."""
        self.streams[-1].do(call)

    def kernel(self, run, name):
        def launch(grid, block, args):
            self.did(name)
            self.do(lambda: run(name, *grid, 5, *args))  # five threads are as good as many
        return launch

    def simple_kernel(self, kernel):
        def launch(*args, **options):
            self.did(kernel.name)
            self.do(lambda: kernel(*plain(args), **plain(options)))
        return launch

    def did(self, what):
        self.log.append(f'{what} on {self.streams[-1].name}')

    def nccl_communicator(self, size, leader, rank):
        if self.nccl_error:
            raise nccl.NcclError(self.nccl_error)
        made = NcclCommunicator(self, size, leader, rank)
        self.nccl_communicators.append(made)
        return made


    def group_start(self):
        self.group = []

    def group_end(self):
        moves, self.group = self.group, None
        self.did('exchange')
        self.do(lambda: MPI.Request.Waitall([move() for move in moves]))


class Device:
    gpu = None
    pci_bus_id = '0000:01:00.0'
    of_thread = threading.local()

    def __init__(self, id=None):
        self.id = getattr(self.of_thread, 'id', 0) if id is None else id
        self.before = []

    def __enter__(self):
        self.before.append(getattr(self.of_thread, 'id', 0))
        self.of_thread.id = self.id
        return self

    def __exit__(self, *args):
        self.of_thread.id = self.before.pop()

    def use(self):
        self.of_thread.id = self.id

    def synchronize(self):
        for stream in self.gpu.all_streams:
            stream.synchronize()


class CudaError(RuntimeError):
    """Stands in for ``CUDARuntimeError``, created from a status."""


class Event:
    status = None  # an error, in place of whether it is done

    def __init__(self, disable_timing):
        self.ptr = self

    @property
    def done(self):
        return self.query() == 0  # as CuPy says it

    def synchronize(self):
        self.stream.run(self.end)

    def query(self):
        if Device().id != self.device_id:
            self.stream.gpu.wrong.append(
                f'a thread made a context on GPU {Device().id}, to ask GPU {self.device_id}')
        if self.status is not None:
            return self.status
        return 0 if self.stream.n_done >= self.end else 600  # cudaErrorNotReady


class Stream:
    def __init__(self, gpu, name):
        self.gpu, self.name, self.ptr = gpu, name, id(self)
        gpu.all_streams.append(self)
        self.pending = False  # whether work has been queued since the last wait
        self.work = deque()
        self.n_done = 0
        self.own = []  # memory of its own, which it gets back only after its work
        self.read = {}  # memory of others, by id

    @property
    def is_late(self):
        return self.gpu.late and self.name != 'caller'

    def __enter__(self):
        self.gpu.streams.append(self)

    def __exit__(self, *args):
        self.gpu.streams.pop()

    def record(self, event):
        event.stream, event.device_id = self, Device().id
        event.end = self.n_done + len(self.work)
        return event

    def wait_event(self, event):
        self.gpu.log.append(f'{self.name} waits for {event.stream.name}')
        self.do(event.synchronize)

    def do(self, call):
        self.pending = True
        if self.is_late:
            self.work.append(call)
        else:
            call()

    def synchronize(self):
        self.run(self.n_done + len(self.work))
        self.pending = False

    def touch(self, array):
        """Records that the device gets the address of an array."""
        memory = owner(array)
        if self.is_late and not any(memory is own for own in self.own):
            self.read[id(memory)] = memory

    def run(self, end):
        while self.n_done < end:
            self.n_done += 1
            self.work.popleft()()
        if not self.work:
            for memory, count in zip(self.read.values(), reference_counts(self.read), strict=True):
                if count == UNREFERENCED:
                    self.gpu.wrong.append(f'{self.name} reads memory that was free: {memory}')
            self.read.clear()
            self.own.clear()


class NcclCommunicator:
    """Stands in for NCCL's communicator, among the ranks with the same leader."""

    def __init__(self, gpu, size, leader, rank):
        world = MPI.COMM_WORLD
        if rank == 0:
            places = sorted([(0, leader), *(world.recv(tag=7) for _ in range(size - 1))])
            for _, other in places[1:]:
                world.send(places, other, tag=8)
        else:
            world.send((rank, world.rank), leader, tag=7)
            places = world.recv(source=leader, tag=8)
        ranks = [world_rank for _, world_rank in places]
        self.mpi_comm = world.Create_group(world.group.Incl(ranks), leader)
        assert (self.mpi_comm.size, self.mpi_comm.rank) == (size, rank)
        self.gpu = gpu
        self.device_id = Device().id
        self.streams = set()

    def allReduce(self, source, target, count, dtype, op, stream):  # noqa: N802
        def work():
            if dtype == 9:  # bfloat16, with zeros after it a float32
                wide = at(source, count, 'u2').astype('u4') << 16
                total = self.combined(wide.view('f4'), op)
                at(target, count, 'u2')[...] = Bf16().compress(total)
            else:
                at(target, count, dtype)[...] = self.combined(at(source, count, dtype), op)
        self.do('allReduce', stream, work)

    def reduceScatter(self, source, target, count, dtype, op, stream):  # noqa: N802
        def work():
            x = at(source, count * self.mpi_comm.size, dtype)
            at(target, count, dtype)[...] = self.combined(x, op).reshape(-1, count)[
                self.mpi_comm.rank]
        self.do('reduceScatter', stream, work)

    def allGather(self, source, target, count, dtype, stream):  # noqa: N802
        self.do('allGather', stream, lambda: self.mpi_comm.Allgather(
            at(source, count, dtype), at(target, count * self.mpi_comm.size, dtype)))

    def reduce(self, source, target, count, dtype, op, root, stream):
        def work():
            combined = self.combined(at(source, count, dtype), op)
            if self.mpi_comm.rank == root:
                at(target, count, dtype)[...] = combined
        self.do('reduce', stream, work)

    def combined(self, x, op):
        """Sums in rank order, so that an element has the same bits at any position."""
        rows = np.empty((self.mpi_comm.size, x.size), x.dtype)
        self.mpi_comm.Allgather(np.array(x), rows)
        with np.errstate(over='ignore'):
            return functools.reduce(
                op, rows.astype('f4') if x.dtype == 'f2' else rows).astype(x.dtype)

    def bcast(self, pointer, count, dtype, root, stream):
        self.do('bcast', stream, lambda: self.mpi_comm.Bcast(at(pointer, count, dtype), root))

    def send(self, pointer, count, dtype, peer, stream):
        assert stream == self.gpu.streams[-1].ptr
        self.streams.add(self.gpu.streams[-1])
        self.gpu.group.append(lambda: self.mpi_comm.Isend(at(pointer, count, dtype), peer))

    def recv(self, pointer, count, dtype, peer, stream):
        assert stream == self.gpu.streams[-1].ptr
        self.gpu.group.append(lambda: self.mpi_comm.Irecv(at(pointer, count, dtype), peer))

    def do(self, what, stream, work):
        assert stream == self.gpu.streams[-1].ptr
        self.streams.add(self.gpu.streams[-1])
        self.gpu.did(what)
        self.gpu.do(work)

    def check_async_error(self):
        self.check_device()
        if self.mpi_comm == MPI.COMM_NULL:
            raise nccl.NcclError('NCCL_ERROR_INVALID_ARGUMENT')

    def abort(self):
        self.check_device()
        self.gpu.did('abort')

    def destroy(self):
        self.gpu.did('destroy')
        self.mpi_comm.Free()

    def check_device(self):
        if Device().id != self.device_id:
            self.gpu.wrong.append(
                f'a thread uses GPU {Device().id} for a communicator of GPU {self.device_id}')


def at(pointer, count, dtype):
    dtype = np.dtype(dtype)
    return np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(pointer), dtype)


@pytest.fixture
def gpu(monkeypatch, compile_kernels):
    """Replaces CuPy and NCCL by the stand-in."""
    gpu = Gpu(compile_kernels)
    for kind in (Array, Device):
        monkeypatch.setattr(kind, 'gpu', gpu)
    monkeypatch.setitem(sys.modules, 'cupy', gpu.cupy)
    monkeypatch.setitem(sys.modules, 'cupyx', gpu.cupyx)
    for name, value in {'available': True, 'cupy': gpu.cupy}.items():
        monkeypatch.setattr(chainer.backends.cuda, name, value)
    for name, value in {
        '_available': True, 'NCCL_BFLOAT16': 9,
        'NCCL_SUM': np.add, 'NCCL_PROD': np.multiply, 'NCCL_MAX': np.maximum,
        'NCCL_MIN': np.minimum, **{f'NCCL_{name.upper()}': name for name in (
            'int8', 'int32', 'int64', 'uint8', 'uint32', 'uint64', 'float16', 'float32',
            'float64')}, 'NcclError': type('E', (RuntimeError,), {}),
        'NcclCommunicator': gpu.nccl_communicator, 'get_version': lambda: 22703,
        'get_unique_id': lambda: MPI.COMM_WORLD.rank,
        'groupStart': gpu.group_start, 'groupEnd': gpu.group_end,
    }.items():
        monkeypatch.setattr(nccl, name, value, raising=False)
    clear = (batched_copy.tables.clear, batched_copy._kernel.cache_clear,
             _batch_norm_on_device.kernel.cache_clear)
    for each in clear:
        each()
    yield gpu
    assert gpu.wrong == []
    for each in clear:
        each()


@pytest.fixture
def make_model(gpu):
    """Creates a model on the stand-in: float16, float32 and float64, one array not contiguous."""
    def make_model(seed):
        random = np.random.RandomState(seed)
        model = chainer.Link()
        with model.init_scope():
            model.a = chainer.Parameter(random.rand(3, 4).astype('f2'))
            model.b = chainer.Parameter(random.rand(batched_copy.LENGTH + 5).astype('f4'))
            model.c = chainer.Parameter(random.rand(5, 2).astype('f4'))
            model.d = chainer.Parameter(random.rand(7).astype('f8'))
            model.e = chainer.Parameter(random.rand(0, 3).astype('f4'))
            model.unused = chainer.Parameter(random.rand(2).astype('f4'))
            model.uninitialized = chainer.Parameter()
        for param in model.params():
            if param.array is not None:
                param.array = param.array.view(Array)
                if param.name != 'unused':
                    param.grad = random.standard_normal(param.shape).astype(
                        param.dtype).view(Array)
        model.c.grad = np.asfortranarray(model.c.grad).view(Array)
        return model
    return make_model
