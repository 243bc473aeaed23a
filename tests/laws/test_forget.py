"""A law of ``F.forget``, which repeats a part of the forward pass."""

import unittest.mock

import chainer
import chainer.functions as F
import pytest
from laws.blocks import BLOCKS
from laws.law import law, planted
from laws.stages import WIDTH, assert_equal, generators, programs, set_seeds, state

from chainer_compat.graph import forward_state
from chainer_compat.graph.forward_state import ForwardState

pytestmark = [pytest.mark.mpi_skip,
              pytest.mark.filterwarnings('ignore:A batch with no more than one sample')]


class Blocks(chainer.ChainList):
    """Calls blocks one after another, optionally each within ``F.forget``."""

    def __init__(self, program, is_forgotten):
        super().__init__(*(BLOCKS[name](WIDTH, (program.seed, n), program.dtype)
                           for n, name in enumerate(program.parts[0].blocks)))
        self.is_forgotten = is_forgotten

    def forward(self, h):
        for block in self:
            h = F.forget(block, h) if self.is_forgotten else block(h)
        return h


def run(program, is_forgotten):
    """Call the blocks several times before backward."""
    set_seeds(program, 0)
    blocks = Blocks(program, is_forgotten)
    xs = [chainer.Variable(program.batch(step)[0]) for step in range(len(program.batches))]
    ys = [blocks(x) for x in xs]
    sum(F.sum(y ** 2) for y in ys).backward()
    found = {f'{name}{n}': array for n, (x, y) in enumerate(zip(xs, ys, strict=True))
             for name, array in [('x', x.grad), ('y', y.array)]}
    return found | state(blocks) | generators()


def without_arrays(restore):
    def changed(self, **options):
        self._arrays.clear()
        restore(self, **options)
    return changed


@law(programs([*BLOCKS], 'fd').filter(lambda program: program.parts[0].blocks),
     planted(ForwardState, 'restore', without_arrays), examples=8)
def test_forget(program):
    """``F.forget`` does not change outputs, gradients, states or random generators."""
    expected = run(program, False)
    with unittest.mock.patch.object(forward_state, '_LARGE', 2**20 * (program.seed % 2)):
        found = run(program, True)
    del found['//is_forgotten'], expected['//is_forgotten']
    assert_equal(found, expected, {'f': 1e-4, 'd': 1e-9}[program.dtype])
