"""Whether MPI takes arrays on a device; the contract tests send the others."""

import pytest

from chainermn._transport import array_buffers

pytestmark = pytest.mark.mpi_skip


def test_cuda_aware(monkeypatch):
    monkeypatch.delenv('CHAINERMN_CUDA_AWARE', raising=False)
    assert array_buffers.cuda_aware() is False
    monkeypatch.setenv('CHAINERMN_CUDA_AWARE', '1')
    assert array_buffers.cuda_aware() is True
    monkeypatch.setenv('CHAINERMN_CUDA_AWARE', '0')
    assert array_buffers.cuda_aware() is False
