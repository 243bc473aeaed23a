"""Events are logged, or printed on stderr if the program has not set up logging."""
import subprocess
import sys

import pytest

pytestmark = pytest.mark.mpi_skip


@pytest.mark.slow
@pytest.mark.parametrize('setup, expected', [
    ('', 'chainermn: epoch 3\n'),
    ('logging.basicConfig(level=logging.INFO)', 'INFO:chainermn:epoch 3\n'),
    ('logging.basicConfig()', ''),
    ("logging.getLogger('chainermn').setLevel(logging.WARNING)", ''),
])
def test_tell(setup, expected):
    program = f"""
import logging
from chainermn._process import event
{setup}
event.tell('epoch %d', 3)
"""
    done = subprocess.run([sys.executable, '-c', program], text=True, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, '', expected)
