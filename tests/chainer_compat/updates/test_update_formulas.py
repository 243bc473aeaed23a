"""Which rules have formulas without temporary arrays; ``test_updates.py`` compares the results."""

import tracemalloc

import chainer
import numpy as np
import pytest
from update_cases import BLOCK, OPTIMIZERS

from chainer_compat.updates import block_updates

pytestmark = pytest.mark.mpi_skip


@pytest.fixture(autouse=True)
def _options(monkeypatch):
    monkeypatch.setattr(chainer.global_config, 'use_torch', 'never')
    monkeypatch.setattr(block_updates, 'BLOCK_OF_FORMULA', BLOCK)


@pytest.mark.parametrize('name', ['SGD', 'MomentumSGD', 'Adam', 'AMSGrad'])
def test_few_allocations(name):
    """Intermediate results need a part of one block, however large the parameter is."""
    model = chainer.Link()
    with model.init_scope():
        model.p = chainer.Parameter(np.zeros(100 * BLOCK, 'f'))
    model.p.grad = np.ones_like(model.p.array)
    optimizer = OPTIMIZERS[name]().setup(model)
    for _ in range(2):
        optimizer.update()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        optimizer.update()
        assert tracemalloc.get_traced_memory()[1] - before < 2 * 4 * BLOCK
    finally:
        tracemalloc.stop()
