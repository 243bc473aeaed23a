"""A stand-in for a GPU: CuPy on NumPy, NCCL on MPI, and the kernels compiled for the host.

It runs everything at once and in order, so it shows what is called, on which stream, and with
which result; not what a real device makes of it.
"""

import ctypes
import platform
import shutil
import subprocess
import sys
import types

import chainer
import numpy as np
import pytest
from mpi4py import MPI

from chainermn import nccl
from chainermn.communicators import _batched_copy
from chainermn.communicators.compression import Bf16

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
            if (name) unpack(pieces, buffer, scale); else pack(pieces, buffer);
}
'''


@pytest.fixture(scope='session')
def compile_kernels(tmp_path_factory):
    """Compiles kernels for the host: ``run(name, blocks, threads, pieces, buffer, scale)``."""
    compiler = shutil.which('g++')
    if compiler is None or platform.machine() != 'x86_64':
        pytest.skip('needs g++ on x86-64')
    compiled = {}

    def compile_kernels(source):
        if source not in compiled:
            folder = tmp_path_factory.mktemp('kernels')
            (folder / 'cuda_fp16.h').write_text(CUDA)
            (folder / 'kernels.cpp').write_text(source + RUN)
            subprocess.run([compiler, '-O1', '-mf16c', '-shared', '-fPIC', '-I', folder, '-o',
                            folder / 'kernels.so', folder / 'kernels.cpp'], check=True)
            compiled[source] = ctypes.CDLL(str(folder / 'kernels.so')).run
        run = compiled[source]
        return lambda name, blocks, threads, pieces, buffer, scale=1.: run(
            name == 'unpack', blocks, threads, ctypes.c_void_p(pieces.ctypes.data),
            ctypes.c_void_p(buffer.ctypes.data), ctypes.c_double(scale))
    return compile_kernels


class Array(np.ndarray):
    """Stands in for ``cupy.ndarray``."""

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.ctypes.data, device_id=0)

    def set(self, x):
        self[...] = x


class Gpu:
    """The stand-in, and a log of what was done on which stream."""

    def __init__(self, compile_kernels):
        self.log = []
        self.streams = [Stream(self, 'caller')]
        self.nccl_error = None
        cuda = types.SimpleNamespace(
            Device=Device,
            Event=lambda disable_timing: types.SimpleNamespace(done=True),
            Stream=lambda non_blocking: Stream(self, 'own'),
            get_current_stream=lambda: self.streams[-1],
            runtime=types.SimpleNamespace(
                getDeviceCount=lambda: 1, CUDARuntimeError=type('Error', (RuntimeError,), {})))
        self.cupy = types.ModuleType('cupy')
        self.cupy.__dict__.update(
            cuda=cuda, ndarray=Array, multiply=np.multiply, zeros_like=np.zeros_like,
            may_share_memory=np.may_share_memory, isfinite=np.isfinite, copyto=np.copyto,
            zeros=lambda shape, dtype: np.zeros(shape, dtype).view(Array),
            where=lambda *args: np.where(*args).view(Array),
            pad=lambda *args: np.pad(*args).view(Array),
            ascontiguousarray=lambda x, dtype=None: np.require(x, dtype, 'C').view(Array),
            empty=lambda shape, dtype: np.full(shape, 77, dtype).view(Array),
            asarray=lambda x: np.array(x).view(Array), asnumpy=self.asnumpy,
            get_array_module=lambda *xs: (
                self.cupy if any(isinstance(x, Array) for x in xs) else np),
            RawModule=lambda code: types.SimpleNamespace(
                get_function=lambda name: self.kernel(compile_kernels(code), name)))
        self.cupyx = types.SimpleNamespace(empty_pinned=np.empty)

    def asnumpy(self, x, out):
        out[...] = x
        return out

    def kernel(self, run, name):
        def launch(grid, block, args):
            self.did(name)
            run(name, *grid, 5, *args)  # five threads are as good as many
        return launch

    def did(self, what):
        self.log.append(f'{what} on {self.streams[-1].name}')

    def nccl_communicator(self, size, leader, rank):
        if self.nccl_error:
            raise nccl.NcclError(self.nccl_error)
        return NcclCommunicator(self, size, leader, rank)


class Device:
    pci_bus_id = '0000:01:00.0'

    def __init__(self, id=0):
        self.id = id

    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass

    def synchronize(self):
        pass


class Stream:
    def __init__(self, gpu, name):
        self.gpu, self.name, self.ptr = gpu, name, id(self)

    def __enter__(self):
        self.gpu.streams.append(self)

    def __exit__(self, *args):
        self.gpu.streams.pop()

    def record(self, event):
        event.stream = self.name
        return event

    def wait_event(self, event):
        self.gpu.log.append(f'{self.name} waits for {event.stream}')

    def synchronize(self):
        pass


class NcclCommunicator:
    """Stands in for NCCL's, between the ranks that know the same leader."""

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

    def allReduce(self, source, target, count, dtype, op, stream):  # noqa: N802
        self.did('allReduce', stream)
        if dtype == 9:  # bfloat16, with zeros after it a float32
            wide = at(source, count, 'u2').astype('u4') << 16
            total = self.combined(wide.view('f4'), op)
            at(target, count, 'u2')[...] = Bf16().compress(total)
            return
        x = at(source, count, dtype)
        at(target, count, dtype)[...] = self.combined(x, op).astype(x.dtype)

    def reduceScatter(self, source, target, count, dtype, op, stream):  # noqa: N802
        self.did('reduceScatter', stream)
        x = at(source, count * self.mpi_comm.size, dtype)
        mine = self.combined(x, op).reshape(-1, count)[self.mpi_comm.rank]
        at(target, count, dtype)[...] = mine.astype(x.dtype)

    def allGather(self, source, target, count, dtype, stream):  # noqa: N802
        self.did('allGather', stream)
        self.mpi_comm.Allgather(at(source, count, dtype),
                                at(target, count * self.mpi_comm.size, dtype))

    def reduce(self, source, target, count, dtype, op, root, stream):
        self.did('reduce', stream)
        x = at(source, count, dtype)
        combined = self.combined(x, op)
        if self.mpi_comm.rank == root:
            at(target, count, dtype)[...] = combined.astype(x.dtype)

    def combined(self, x, op):
        wide = x.astype('f4') if x.dtype == 'f2' else np.array(x)
        result = np.empty_like(wide)
        self.mpi_comm.Allreduce(wide, result, op)
        return result

    def bcast(self, pointer, count, dtype, root, stream):
        self.did('bcast', stream)
        self.mpi_comm.Bcast(at(pointer, count, dtype), root)

    def did(self, what, stream):
        assert stream == self.gpu.streams[-1].ptr
        self.gpu.did(what)

    def destroy(self):
        self.gpu.did('destroy')
        self.mpi_comm.Free()


def at(pointer, count, dtype):
    dtype = np.dtype(dtype)
    return np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(pointer), dtype)


@pytest.fixture
def gpu(monkeypatch, compile_kernels):
    """Puts the stand-in in the place of CuPy and NCCL."""
    gpu = Gpu(compile_kernels)
    monkeypatch.setitem(sys.modules, 'cupy', gpu.cupy)
    monkeypatch.setitem(sys.modules, 'cupyx', gpu.cupyx)
    for name, value in {'available': True, 'cupy': gpu.cupy}.items():
        monkeypatch.setattr(chainer.backends.cuda, name, value)
    for name, value in {
        '_available': True, 'NCCL_BFLOAT16': 9,
        'NCCL_SUM': MPI.SUM, 'NCCL_PROD': MPI.PROD, 'NCCL_MAX': MPI.MAX,
        'NCCL_MIN': MPI.MIN, **{f'NCCL_{name.upper()}': name for name in (
            'int8', 'int32', 'int64', 'uint8', 'uint32', 'uint64', 'float16', 'float32',
            'float64')}, 'NcclError': type('E', (RuntimeError,), {}),
        'NcclCommunicator': gpu.nccl_communicator, 'get_version': lambda: 22703,
        'get_unique_id': lambda: MPI.COMM_WORLD.rank,
    }.items():
        monkeypatch.setattr(nccl, name, value, raising=False)
    caches = _batched_copy._table, _batched_copy._kernel
    for cache in caches:
        cache.cache_clear()
    yield gpu
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def make_model(gpu):
    """Makes a model on the stand-in: float16, float32 and float64, one array not contiguous."""
    def make_model(seed):
        random = np.random.RandomState(seed)
        model = chainer.Link()
        with model.init_scope():
            model.a = chainer.Parameter(random.rand(3, 4).astype('f2'))
            model.b = chainer.Parameter(random.rand(_batched_copy.LENGTH + 5).astype('f4'))
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
