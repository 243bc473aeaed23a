"""Averages gradients for some seconds: ``steps.py SECONDS [WAY]``.

Rank 0 writes a line before each step. After the third step, the last rank fails, or pauses, in
this way.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time

import chainer
import numpy as np

import chainermn


def hold_lock():
    """Hold the GIL, as a long call of C code does."""
    ctypes.PyDLL(None).sleep(45)


def stop():
    with subprocess.Popen(['sh', '-c', f'sleep 40; kill -CONT {os.getpid()}']):
        os.kill(os.getpid(), signal.SIGSTOP)


WAYS = {'SIGKILL': lambda: os.kill(os.getpid(), signal.SIGKILL),
        'exception': lambda: int('no number'),
        'pause': lambda: time.sleep(25), 'lock': hold_lock, 'stop': stop}


def main():
    seconds, way = float(sys.argv[1]), WAYS.get(sys.argv[2] if len(sys.argv) > 2 else '')
    comm = chainermn.create_communicator('flat')
    model = chainer.links.Linear(1000, 300)
    end = time.monotonic() + seconds
    step, is_running = 0, True
    while is_running:
        if comm.rank == 0:
            print('step', step, flush=True)
        if way and step == 3 and comm.rank == comm.size - 1:
            way()
        for param in model.params():
            param.grad = np.full_like(param.array, step + comm.rank)
        comm.multi_node_mean_grad(model)
        for param in model.params():
            assert (param.grad == step + (comm.size - 1) / 2).all()
        step += 1
        is_running = comm.bcast_obj(time.monotonic() < end)
    if comm.rank == 0:
        print('finished after', step, 'steps', flush=True)


if __name__ == '__main__':
    main()
