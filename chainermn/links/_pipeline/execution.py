"""Runs the steps of a schedule: one call of a pipeline on one rank."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import chainer
from chainer.utils import force_array

from chainermn._operations.common_error import add_note
from chainermn._types import Array, Model, Variable
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.links._pipeline.messages import Message, StageMessages, ahead
from chainermn.links._pipeline.observations import Observations
from chainermn.links._pipeline.recomputation import Recomputation
from chainermn.links._pipeline.schedule import Step
from chainermn.links._pipeline.stages import Stage
from chainermn.links.multi_node_chain_list import Value, as_tuple


class Work(NamedTuple):
    """The work of a rank.

    Attributes:
        link_of: Function that returns the link whose state a stage uses.
        compute: Function that returns the output of a stage for a micro-batch and its inputs.
        weights: The share of each micro-batch in the loss.
        scale: The gradient of the loss.
        add_gradients: Function that moves the gradients of a micro-batch out of the parameters.
        recompute: Whether backward steps repeat the forward step instead of using a saved graph.
    """

    link_of: Callable[[Stage], Model]
    compute: Callable[[Stage, int, Sequence[Value]], Value]
    weights: Sequence[float]
    scale: float
    add_gradients: Callable[[], None]
    recompute: bool


class _Saved(NamedTuple):
    """The values of a forward step that its backward step needs."""

    inputs: Sequence[Value]
    output: Value | None  # has its graph
    recomputation: Recomputation | None


class Execution:
    """Runs the steps of this rank.

    Args:
        comm: The communicator.
        stages: All stages.
        work: The work of this rank.
        messages: The messages between stages.

    Attributes:
        loss: The weighted sum of the losses so far; ``None`` if this rank has no output.
        observations: The values that the stages report.
    """

    def __init__(self, comm: CommunicatorBase, stages: Sequence[Stage], work: Work,
                 messages: StageMessages) -> None:
        self._comm, self._stages, self._work = comm, stages, work
        self._messages = messages
        self._saved: dict[tuple[int, int], _Saved] = {}
        self._begun: dict[int, Recomputation | None] = {}  # the latest one, by stage
        self._differences: list[tuple[str, Array | bool]] = []
        self.loss: Array | None = None
        self.observations = Observations()

    def run(self, steps: Sequence[Step]) -> None:
        """Run steps. During each step, messages for the next step may arrive."""
        with contextlib.closing(self._messages):
            for n, step in enumerate(steps):
                self._messages.post(ahead(self._stages, steps[n:n + 2]))
                stage, run = self._stages[step.stage], (
                    self._forward if step.is_forward else self._backward)
                try:
                    run(stage, step.micro_batch)
                except Exception as error:
                    add_note(error, f'in {stage.step_text(step.micro_batch, step.is_forward)}')
                    raise
            self._messages.finish()

    def _forward(self, stage: Stage, k: int) -> None:
        received = [self._messages.receive(edge, k, True) for edge in stage.edges_in]
        inputs = [_as_value(
            [_leaf(x, flag) for x, flag in zip(message.arrays, message.flags, strict=True)],
            message.is_tuple) for message in received]
        has_backprop = chainer.config.enable_backprop
        recomputation = self._recomputation(stage) if has_backprop else None
        with self._span(stage, k, 'forward'), self.observations.of(self._work.weights[k]), (
                contextlib.nullcontext() if recomputation is None else chainer.no_backprop_mode()):
            y = self._work.compute(stage, k, inputs)
        if stage.has_output:
            self._add(y, k)
        for edge in stage.edges_out:
            self._messages.send(edge, k, True, _message(y, stage, has_backprop))
        if recomputation is not None:
            recomputation.set_output(_arrays(y))
        if has_backprop:
            self._saved[stage.number, k] = _Saved(
                inputs, y if recomputation is None else None, recomputation)

    def _backward(self, stage: Stage, k: int) -> None:
        inputs, y, recomputation = self._saved.pop((stage.number, k))
        grads = [self._messages.receive(edge, k, False).arrays for edge in stage.edges_out]
        with self._span(stage, k, 'backward'):
            if recomputation is not None:
                y = self._recomputed(stage, k, inputs, recomputation)
            outputs = () if y is None else as_tuple(y)
            if y is None:  # an error is raised at the end
                grads = []
            for each in grads:
                for variable, grad in zip(outputs, each, strict=True):
                    if _needs_gradient(variable):
                        variable.grad = (grad if variable.grad is None
                                         else force_array(variable.grad + grad))
            if stage.has_output:
                loss, = outputs
                loss.grad = loss.xp.full(
                    loss.shape, self._work.scale * self._work.weights[k], loss.dtype)
            roots = [x for x in outputs if isinstance(x, chainer.Variable)
                     and x.requires_grad and x.grad is not None]
            _run_backward(roots)
            self._work.add_gradients()
        for edge, value in zip(stage.edges_in, inputs, strict=True):
            self._messages.send(edge, k, False, _gradients(value))

    def _recomputation(self, stage: Stage) -> Recomputation | None:
        """Begin a forward step that will be repeated. Return ``None`` if its graph is saved."""
        # The last stage usually runs backward in the next step, so it saves its graph.
        if not self._work.recompute or stage.has_output:
            return None
        link = self._work.link_of(stage)
        is_first = stage.number not in self._begun
        if is_first and not all(param.is_initialized for param in link.params()):
            # The step initializes parameters, so repeating it would give a different result.
            found = None
        else:
            found = Recomputation(link, self._begun.get(stage.number))
        self._begun[stage.number] = found
        return found

    def _recomputed(self, stage: Stage, k: int, inputs: Sequence[Value],
                    recomputation: Recomputation) -> Value | None:
        """Compute an output again. Return ``None`` if its shape differs."""
        with recomputation.repeated(), Observations().of(0):
            y = self._work.compute(stage, k, inputs)
        differences = recomputation.differences(_arrays(y))
        self._differences += [
            (f'stage {stage.number}, micro-batch {k} ({stage.name})', each)
            for each in ([True] if differences is None else differences)]
        return None if differences is None else y

    def _add(self, loss: Variable, k: int) -> None:
        if not loss.size:  # the model itself communicates and has no loss on this rank
            return
        value = loss.array.reshape(()) * loss.dtype.type(self._work.weights[k])
        self.loss = value if self.loss is None else self.loss + value

    def difference(self) -> str | None:
        """Describe the first output that differed when it was recomputed."""
        return next((text for text, differs in self._differences if differs), None)

    def _span(self, stage: Stage, k: int, direction: str
              ) -> contextlib.AbstractContextManager[object]:
        return self._comm.span(f'{direction} of stage {stage.number}, micro-batch {k}')


def _run_backward(roots: Sequence[Variable]) -> None:
    if len(roots) == 1:
        roots[0].backward()
    elif roots:
        chainer.backward(roots)


def _leaf(x: Array, flag: int) -> Variable:
    return chainer.Variable(x, requires_grad=bool(flag))


def _as_value(xs: Sequence[Variable], is_tuple: bool) -> Value:
    return tuple(xs) if is_tuple else xs[0]


def _arrays(y: Value) -> tuple[Array, ...]:
    return tuple(x.array if isinstance(x, chainer.Variable) else x for x in as_tuple(y))


def _needs_gradient(y: Variable) -> bool:
    return isinstance(y, chainer.Variable) and y.requires_grad and y.dtype.kind == 'f'


def _message(y: Value, stage: Stage, has_backprop: bool) -> Message:
    """Return the message with an output."""
    ys = as_tuple(y)
    kinds = chainer.Variable, *chainer.get_array_types()
    if not ys or not all(isinstance(each, kinds) for each in ys):
        raise TypeError(f'Pipeline: {stage.name} returned {y!r}, but a stage must return a '
                        'Variable or array, or a tuple of these.')
    # As with functions.send, a tuple with one element arrives as the element.
    return Message(_arrays(y), tuple(int(has_backprop and _needs_gradient(x)) for x in ys),
                   len(ys) > 1)


def _gradients(value: Value) -> Message:
    """Return the message with the gradients of a received output. Unneeded ones are empty."""
    arrays = []
    for x in as_tuple(value):
        if not x.requires_grad:
            arrays.append(x.xp.empty(0, x.dtype))
        else:
            arrays.append(x.xp.zeros_like(x.array) if x.grad is None else x.grad)
    return Message(tuple(arrays), (0,) * len(arrays), True)
