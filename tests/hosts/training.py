"""Trains with checkpoints: ``training.py FOLDER``, until the file FOLDER/finish exists.

Rank 0 writes the number of ranks and the iteration when training starts, and after each iteration.
"""

import pathlib
import sys
import time

import chainer
import numpy as np

import chainermn


def main():
    folder = pathlib.Path(sys.argv[1])
    comm = chainermn.create_communicator('flat')
    model = chainer.links.Linear(10, 2)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.Adam(), comm).setup(model)
    data = chainermn.scatter_dataset(np.ones((100, 10), np.float32), comm)
    updater = chainer.training.StandardUpdater(
        chainer.iterators.SerialIterator(data, 5), optimizer,
        loss_func=lambda x: chainer.functions.sum(model(x) ** 2))
    trainer = chainer.training.Trainer(
        updater, lambda _: comm.bcast_obj((folder / 'finish').exists()), out=str(folder))
    checkpointer = chainermn.create_multi_node_checkpointer('run', comm)
    trainer.extend(checkpointer, trigger=(5, 'iteration'))
    checkpointer.maybe_load(trainer, optimizer)

    def say(what):
        if comm.rank == 0:
            print(what, comm.size, updater.iteration, flush=True)

    def step(trainer):
        say('step')
        time.sleep(.1)

    trainer.extend(step, trigger=(1, 'iteration'))
    say('start')
    trainer.run()


if __name__ == '__main__':
    main()
