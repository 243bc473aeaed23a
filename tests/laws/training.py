"""Trainings by all ranks, and their comparison with one process."""

import contextlib

import chainer
import numpy as np
from laws.one_process import ROUNDING, TOLERANCES, Reference, arrays
from laws.programs import COMPRESSIONS, OPTIMIZERS, STEPS, Net

import chainermn


class ProgramError(Exception):
    """The program's own error."""


class Training:
    """A training of a random program, with the multi-node optimizer.

    Args:
        program: The program.
        comm: The communicator.
        options: More options of the optimizer.
    """

    def __init__(self, program, comm, **options):
        self.program, self.comm, self.options = program, comm, options
        self.optimizer = self.start()

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
            OPTIMIZERS[program.optimizer](), self.comm, **options)
        optimizer.setup(Net(program, self.comm.rank))
        program.configure(optimizer)
        return optimizer

    def update(self, number):
        net, batch = self.optimizer.target, self.program.batch(
            number, self.comm.rank, self.comm.size)
        if self.program.is_manual and self.program.mode == 'plain':
            loss = net(*batch)
            net.cleargrads()
            loss.backward(loss_scale=self.optimizer._loss_scale)
            self.optimizer.update()
        else:
            self.optimizer.update(net, *batch)

    def happen(self, step):
        """Let the event of a step happen."""
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
        """Save and load on each rank, into a new optimizer."""
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
        for before, after in ((old.target, new.target), (old, new)):
            serializer = chainer.serializers.DictionarySerializer()
            serializer.save(before)
            chainer.serializers.NpzDeserializer(
                {key: np.array(value) for key, value in serializer.target.items()},
                strict=after is new.target).load(after)
        self.optimizer = new

    def wait(self):
        """Wait for what is sent in the background."""
        if hasattr(self.optimizer, 'wait'):
            self.optimizer.wait()

    def run(self):
        """Train; return the parameters after each update."""
        history = []
        for step in range(STEPS):
            self.happen(step)
            self.update(step)
            history.append(arrays(self.optimizer.target))
        self.wait()
        return history


def check_against_one_process(comm, program, **options):
    """Train on all ranks and on one; the parameters must be the same after each step.

    All ranks compute the reference, so none of them runs ahead.
    """
    found = Training(program, comm, **options)
    reference = Reference(program, comm.size)
    number, is_fresh, differing = 0, True, ''
    for step in range(STEPS):
        event = program.events[step]
        if step > 1:
            found.happen(step)
            if event == 'resume' or (event == 'add' and not hasattr(reference.model, 'added')):
                reference.is_fresh = is_fresh = True
            program.happen(reference.optimizer, step)
        for _ in range(1 if is_fresh else program.n_accumulations):
            found.update(number)
            reference.update(number)
            number += 1
        is_fresh = False
        expected = arrays(reference.model)
        if not all(np.isfinite(array).all() for array in expected.values()):
            break  # float16 may overflow, and 1 ulp changes everything from there
        differing = differing or compare(program, step, found.optimizer, expected,
                                         reference.optimizer.t)
    found.wait()
    assert not differing, differing


def compare(program, step, optimizer, expected, t):
    """Return what differs from the reference, or ''."""
    tolerance = max(TOLERANCES[program.dtype], ROUNDING.get(program.compression, 0))
    ours, differing = arrays(optimizer.target), {}
    for path, array in expected.items():
        scale = max(1., np.abs(array).max(initial=0))
        error = float(np.abs(ours[path].astype('d') - array).max(initial=0)) / scale
        if not error <= tolerance:
            differing[path] = error
    if optimizer.t != t:
        differing['t'] = f'{optimizer.t}, not {t}'
    return f'step {step}: {differing}' if differing else ''
