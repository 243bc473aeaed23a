"""The exit status of a process is recorded, and the script cannot tell."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.mpi_skip

START = '''
import atexit, ctypes, sys, threading
atexit.register(lambda: print('outcome', outcome.status, uncaught, flush=True))
from chainermn._process import exit_status
from chainermn._process.exit_status import listen
outcome = exit_status.outcome()
uncaught = []
outcome.uncaught = lambda hook, kind, value, tb: uncaught.append(kind.__name__)
listen()
listen()
'''


def run(body):
    done = subprocess.run([sys.executable, '-c', START + body], timeout=50, text=True,
                          capture_output=True)
    *printed, outcome = done.stdout.splitlines()
    return done.returncode, outcome, printed, done.stderr


@pytest.mark.slow
@pytest.mark.sample(5)
@pytest.mark.parametrize('body, status, outcome', [
    ('', 0, '0 []'),
    ('sys.exit()', 0, '0 []'),
    ('sys.exit(3)', 3, '3 []'),
    ('raise SystemExit(3)', 3, '3 []'),
    ('class Mine(SystemExit): pass\nraise Mine(3)', 3, '3 []'),
    ('sys.exit(SystemExit(3))', 3, '3 []'),
    ('sys.exit("why")', 1, '1 []'),
    ('sys.exit((1, 2))', 1, '1 []'),
    ('raise SystemExit(1, 2)', 1, '1 []'),
    ('sys.exit(-1)', 255, '255 []'),
    ('exit(3)', 3, '3 []'),
    ('raise ValueError', 1, "1 ['ValueError']"),
    ('sys.excepthook = None\nraise ValueError', 1, "1 ['ValueError']"),
    ('raise KeyboardInterrupt', -2, "-2 ['KeyboardInterrupt']"),
])
def test_the_end_of_a_program(body, status, outcome):
    assert run(body)[:2] == (status, f'outcome {outcome}')


@pytest.mark.slow
@pytest.mark.parametrize('body', [
    # Caught, or of a thread.
    'try: sys.exit(3)\nexcept SystemExit as error: assert error.code == 3',
    'thread = threading.Thread(target=sys.exit, args=[3])\nthread.start()\nthread.join()',
    # Shown by the program.
    'sys.excepthook(ValueError, ValueError(), None)',
    # Shown by C code, which continues.
    "ctypes.pythonapi.PyRun_SimpleString(b'raise ValueError')",
])
def test_what_does_not_end_the_program(body):
    assert run(body)[:2] == (0, 'outcome 0 []')


def test_the_exit_code_of_an_error_is_what_it_was():
    _, _, printed, stderr = run('''
error = SystemExit()
print(error.code, SystemExit(256).code, SystemExit('why').code, SystemExit(1, 2).code)
error.code = 7
print(error.code, error.args)
try:
    sys.exit((1, 2))
except SystemExit as error:
    print(error.code)
''')
    assert (printed, stderr) == (['None 256 why (1, 2)', '7 ()', '(1, 2)'], '')
