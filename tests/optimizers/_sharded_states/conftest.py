"""Updates as by Chainer: PyTorch may round parts of a parameter differently than the whole."""

import chainer
import pytest


@pytest.fixture(autouse=True)
def _bitwise_updates():
    with chainer.using_config('fused_updates', False):
        yield
