"""The ring gives what allreduce gives, on any number of ranks and for any length."""

import runpy

import numpy as np
import pytest

import chainermn


@pytest.mark.slow
@pytest.mark.mpi_skip
def test_script(run):
    lines = run('ring_allreduce/ring_allreduce.py', '--size', '1000', '--repeat', '1',
                ranks=3).splitlines()
    assert lines[0] == '3 processes, 1000 numbers each'
    assert float(lines[1].split(': ')[1]) < 1e-6
    assert lines[2].startswith('time: ')


@pytest.mark.parametrize('shape', [(), (1,), (2,), (7,), (3, 5), (100, 1000)])
def test_ring(examples, shape):
    ring_allreduce = runpy.run_path(
        str(examples / 'ring_allreduce' / 'ring_allreduce.py'))['ring_allreduce']
    comm = chainermn.create_communicator('naive')
    x = np.random.RandomState(comm.rank).uniform(-1, 1, shape)
    total = ring_allreduce(comm, x)
    np.testing.assert_allclose(total, comm.allreduce(x), rtol=1e-12)
    assert len(set(comm.allgather_obj(total.tobytes()))) == 1
