"""The tests of conversions need PyTorch."""

import pytest

pytest.importorskip('torch')
