"""Trains random programs on all ranks and compares the results with one process."""

import contextlib
import random

import chainer
import numpy as np
from laws.one_process import ROUNDING, TOLERANCES, Reference, arrays
from laws.programs import COMPRESSIONS, STEPS, Net
from mpi4py import MPI

import chainermn


class ProgramError(Exception):
    """An error that a program raises in its loss function."""


class Training:
    """Trains the model of a random program with the multi-node optimizer.

    Args:
        program: The program.
        comm: The communicator.
        options: Additional options of the optimizer.
    """

    def __init__(self, program, comm, **options):
        self.program, self.comm, self.options = program, comm, options
        random.seed(program.seed + comm.rank)
        np.random.seed(program.seed + comm.rank)
        self.optimizer = self.start()
        self.kept = []  # gradients that the program still has, with copies of their values

    def start(self):
        program = self.program
        options = {
            'double_buffering': program.mode == 'double buffering',
            'zero_fill': program.zero_fill,
            'n_accumulations': program.n_accumulations,
            'compression': COMPRESSIONS[program.compression],
            'overlap': 'always' if program.mode == 'overlap' else False, 'bucket_mb': 1e-4,
            'shard_states': program.shard, **self.options}
        optimizer = chainermn.create_multi_node_optimizer(
            program.create(), self.comm, **options)
        optimizer.setup(Net(program, self.comm.rank))
        program.configure(optimizer)
        return optimizer

    def update(self, number):
        """Update once. Check that the gradients that the program keeps have not changed."""
        self.update_once(number)
        for array, copy in self.kept:
            np.testing.assert_array_equal(array, copy)
        self.kept = copied_gradients(self.optimizer.target)

    def update_once(self, number):
        net, batch = self.optimizer.target, self.program.batch(
            number, self.comm.rank, self.comm.size)
        if self.program.is_manual and self.program.mode == 'plain':
            loss = net(*batch)
            net.cleargrads()
            # A program that does not pass the loss scale gets gradients without it.
            loss.backward(loss_scale=self.optimizer._loss_scale if self.program.seed % 3 else None)
            self.kept += copied_gradients(net)
            self.optimizer.update()
        else:
            self.optimizer.update(net, *batch)

    def happen(self, step):
        """Apply the event of a step."""
        event = self.program.events[step]
        if event == 'resume':
            self.resume()
        elif event == 'exception':
            def fail():
                self.optimizer.target(*self.program.batch(0, self.comm.rank, self.comm.size))
                raise ProgramError

            with contextlib.suppress(ProgramError):
                self.optimizer.update(fail)
        else:
            self.program.happen(self.optimizer, step)

    def resume(self):
        """Save the optimizer and load it into a new one, on each rank."""
        self.wait()
        old, new = self.optimizer, self.start()
        if hasattr(old.target, 'added'):
            with new.target.init_scope():
                new.target.added = chainer.Parameter(np.zeros_like(old.target.added.array))
            new.setup(new.target)
        for hook in ('_pre_update_hooks', '_post_update_hooks'):
            getattr(new._hookable, hook).update(getattr(old._hookable, hook))
        for (_, before), (_, after) in zip(sorted(old.target.namedparams()),
                                           sorted(new.target.namedparams()), strict=True):
            after.update_rule._hookable = before.update_rule._hookable
            after.update_rule.enabled = before.update_rule.enabled
        for name, value in old.hyperparam.get_dict().items():
            setattr(new.hyperparam, name, value)
        self.transfer(old, new)
        self.optimizer = new

    def transfer(self, old, new):
        """Save an optimizer and its model, and load them into another optimizer and its model."""
        for before, after in ((old.target, new.target), (old, new)):
            serializer = chainer.serializers.DictionarySerializer()
            serializer.save(before)
            chainer.serializers.NpzDeserializer(
                {key: np.array(value) for key, value in serializer.target.items()},
                strict=after is new.target).load(after)

    def wait(self):
        """Wait for gradients that are averaged in the background."""
        if hasattr(self.optimizer, 'wait'):
            self.optimizer.wait()

    def run(self):
        """Train. Return the model's state after each step, and random numbers drawn at the end."""
        history = []
        for step in range(STEPS):
            self.happen(step)
            self.update(step)
            history.append(state(self.optimizer.target))
        self.wait()
        return [*history, random.random(), np.random.random()]


def copied_gradients(model):
    """Return the gradients of a model, each with a copy."""
    return [(param.grad, param.grad.copy()) for param in model.params(include_uninit=False)
            if param.grad is not None]


def state(model):
    """Return everything that a snapshot of a model contains."""
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(model)
    return {key: np.array(value) for key, value in serializer.target.items()}


def check_against_one_process(comm, program, kind=Training, **options):
    """Train on all ranks, then in one process on rank 0. Compare the parameters of each step.

    The parameters must be bitwise identical on all ranks.
    """
    found = kind(program, comm, **options)
    reference = Reference(program, comm.size) if comm.rank == 0 else None
    number, is_fresh, was_added, history = 0, True, False, []
    for step in range(STEPS):
        if step > 1:
            found.happen(step)
            is_fresh = program.events[step] == 'resume' or (
                program.events[step] == 'add' and not was_added)
            was_added = was_added or program.events[step] == 'add'
        n_updates = 1 if is_fresh else program.n_accumulations
        for _ in range(n_updates):
            found.update(number)
            number += 1
        is_fresh = False
        history.append((n_updates, arrays(found.optimizer.target), found.optimizer.t))
    found.wait()
    digests = MPI.COMM_WORLD.allgather([
        {path: array.tobytes() for path, array in parameters.items()}
        for _, parameters, _ in history])
    assert all(other == digests[0] for other in digests), 'the ranks have different parameters'
    if reference is not None:
        compare_history(program, reference, history)


def compare_history(program, reference, history):
    """Train in one process, and compare its parameters with the ranks' after each step."""
    number = 0
    for step, (n_updates, parameters, t) in enumerate(history):
        if step > 1:
            event = program.events[step]
            if event == 'add' and not hasattr(reference.model, 'added'):
                reference.set_up()
            elif event == 'resume':
                reference.is_fresh = True
            program.happen(reference.optimizer, step)
        for _ in range(n_updates):
            reference.update(number)
            number += 1
        if not is_finite(reference):
            return
        compare(program, step, parameters, t, reference)


def is_finite(reference):
    """Return whether results can be compared.

    If float16 overflows, rounding decides where, so the results may differ completely.
    """
    return all(np.isfinite(array).all() for array in arrays(reference.model).values())


def compare(program, step, parameters, t, reference):
    """Raise an error that lists the differences from the reference."""
    tolerance = TOLERANCES[program.dtype] + ROUNDING.get(program.compression, 0)
    differing = {} if t == reference.optimizer.t else {'t': f'{t}, not {reference.optimizer.t}'}
    for path, expected in arrays(reference.model).items():
        scale = max(1., np.abs(expected).max(initial=0))
        error = float(np.abs(parameters[path].astype('d') - expected).max(initial=0)) / scale
        if not error <= tolerance:
            differing[path] = error
    assert not differing, f'step {step}: {differing}'
