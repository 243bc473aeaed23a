"""Run old programs with any version of Chainer, and print the losses of each as a line of JSON.

``python run.py 1.5/mlp.py 1.24/vae.py`` runs each program as a user would, as the main program of a
process of its own, in an empty folder. Versions of Chainer draw initial parameters in other orders,
so each model gets the same ones when it is given to an optimizer: constants, such as biases, stay
as they are, and random values are drawn again, from a normal distribution seeded by the name of the
parameter. The program's own random numbers, such as those for dropout, start from a seed there.

It also runs with Python 3.6 and Chainer 1.5.
"""

import atexit
import contextlib
import json
import os
import runpy
import shutil
import sys
import tempfile
import traceback
import warnings
import zlib

import chainer
import numpy as np


def draw_parameters(link, done):
    """Replace the random initial values of a link; ``done`` has the arrays that are finished."""
    for name, param in link.namedparams():
        if any(param.data is array for array in done):
            continue
        if param.data.size and np.ptp(param.data):
            random = np.random.RandomState(zlib.crc32(name.encode()))
            fan_in = param.data[0].size
            param.data[...] = random.standard_normal(param.data.shape) / fan_in ** .5
        done.append(param.data)


def same_random_numbers():
    setup, done = chainer.Optimizer.setup, []

    def seeded_setup(optimizer, link, *args):
        result = setup(optimizer, link, *args)
        draw_parameters(link, done)
        np.random.seed(1)
        return result

    chainer.Optimizer.setup = seeded_setup
    np.random.seed(1)


def numbers(text):
    """Return the last word of each line, where it is a number."""
    found = []
    for line in text.splitlines():
        with contextlib.suppress(IndexError, ValueError):
            found.append(float(line.split()[-1]))
    return found


def run(path, folder):
    """Run a program in a folder; return its losses, or its error."""
    sys.argv = [path]
    os.chdir(folder)
    stdout = os.dup(1)
    os.dup2(os.open('stdout', os.O_WRONLY | os.O_CREAT), 1)
    same_random_numbers()
    try:
        runpy.run_path(path, run_name='__main__')
    except Exception:
        return traceback.format_exc()
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
    with open('stdout') as file:
        return numbers(file.read())


def run_in_a_process(path, folder):
    child = os.fork()
    if not child:
        losses = run(path, folder)
        with open('losses', 'w') as file:
            json.dump(losses, file)
        atexit._run_exitfuncs()  # ends the processes of iterators
        os._exit(0)
    os.waitpid(child, 0)
    with open(os.path.join(folder, 'losses')) as file:
        return json.load(file)


if __name__ == '__main__':
    warnings.simplefilter('ignore')
    here = os.getcwd()
    # Ranks of a job run all programs themselves.
    run_one = run if {'PMI_RANK', 'OMPI_COMM_WORLD_RANK'} & set(os.environ) else run_in_a_process
    for program in sys.argv[1:]:
        empty = tempfile.mkdtemp()
        result = run_one(os.path.join(here, program), empty)
        os.chdir(here)
        shutil.rmtree(empty)
        print(json.dumps([program, result]), flush=True)
