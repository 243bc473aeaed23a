"""The tests of conversions need PyTorch."""

import importlib.util

import numpy as np
import pytest

if importlib.util.find_spec('torch') is None:
    collect_ignore_glob = ['test_*.py']


@pytest.fixture(autouse=True)
def seeds():
    """Rounding depends on the random numbers: log(-log(u)) amplifies it where u is close to 1."""
    import torch

    np.random.seed(0)
    torch.manual_seed(0)
