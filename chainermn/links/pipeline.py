"""Pipeline parallelism: ranks compute their stages at the same time on different micro-batches."""
from __future__ import annotations

import contextlib
import numbers
from collections.abc import Callable, Mapping
from typing import NamedTuple, NoReturn

import chainer
import numpy as np

from chainermn._operations.arguments import is_integer
from chainermn._operations.call_signature import Caller
from chainermn._operations.on_all_ranks import (
    check_equal,
    on_all_ranks,
    raise_on_all_ranks,
    raise_together,
)
from chainermn._types import Array, Model, Object, Parameter, Variable
from chainermn.communicators._recognize import as_communicator
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.links._pipeline import micro_batches, observations, targets
from chainermn.links._pipeline.clipping import GradientClipping
from chainermn.links._pipeline.execution import Execution, Work
from chainermn.links._pipeline.gradients import Collected, loss_scale
from chainermn.links._pipeline.messages import StageMessages
from chainermn.links._pipeline.model import Batch, RankModel
from chainermn.links._pipeline.schedule import NAMES, Name, clock_cycles, steps_of
from chainermn.links._pipeline.stages import Stage, connect
from chainermn.links._pipeline.tied import Tied, descriptions
from chainermn.links._pipeline.transfers import Transfers

_NOT_RECOMPUTED = (
    'Pipeline: with recompute=True, the second forward pass of {} returned a different output than '
    'the first one. It depends on a state that Pipeline does not restore. Keep this state in '
    'attributes of the link (numbers, arrays, Variables, random generators, or lists or dicts of '
    'these), use the global random generators of NumPy, random, PyTorch or CuPy, or pass '
    'recompute=False.')


class Pipeline:
    """A loss function that runs the stages of a model at the same time on micro-batches.

    It divides each batch into micro-batches. While one rank computes its stage for one micro-batch,
    the other ranks compute their stages for other micro-batches. Pass it to the optimizer in place
    of the model::

        optimizer.update(chainermn.Pipeline(model, lossfun), x, t)

    A call computes the loss *and* the gradients, because the backward pass of the first
    micro-batches runs before the forward pass of the last ones. Call ``backward()`` on the result
    to accumulate the gradients in the parameters; until then, the model is unchanged. In
    ``chainer.no_backprop_mode()``, a call computes only the loss.

    Args:
        model: The :class:`MultiNodeChainList` of this rank, or a link that contains it, such as
            ``L.Classifier``. Each of its links is a stage.
        lossfun: Function called as ``lossfun(y, t)`` with the output of the model and the last
            argument of the call. It returns the loss, which must be a mean over examples: a sum
            would depend on ``n_micro_batches``. ``None`` if ``model`` returns the loss.
        n_micro_batches: Number of micro-batches in a batch. A batch with fewer examples is divided
            into single examples.
        schedule: ``'1f1b'`` alternates forward and backward passes. The number of micro-batches in
            a stage is at most one more than the number of stages from this stage to the output, so
            memory does not grow with ``n_micro_batches``. ``'gpipe'`` runs the forward passes of
            all micro-batches, then all backward passes.
        tied: Parameters that several ranks share, by name. Each of these ranks passes its own
            parameter, with the same shape and dtype. The parameters start with the value of the
            first of these ranks and get the sum of the gradients of all these ranks.
        recompute: Whether stages save only their inputs and repeat the forward pass before the
            backward pass, with the state that links and random generators had in the first forward
            pass.
        communicator: Communicator for a model that contains no ``MultiNodeChainList``. Such a model
            communicates through :mod:`chainermn.functions` and is one stage as a whole.

    Raises:
        TypeError, ValueError: If an argument is invalid.

    Example:
        >>> model = chainermn.MultiNodeChainList(comm)
        >>> if comm.rank == 0:
        ...     model.add_link(L.Linear(3, 4), rank_in=None, rank_out=1)
        ... else:
        ...     model.add_link(L.Linear(4, 2), rank_in=0, rank_out=None)
        >>> optimizer = chainer.optimizers.SGD().setup(model)
        >>> pipeline = chainermn.Pipeline(model, F.softmax_cross_entropy, n_micro_batches=4)
        >>> optimizer.update(pipeline, *batch)
    """

    def __init__(
        self, model: Model, lossfun: Callable[..., Variable] | None = None,
        n_micro_batches: int = 8, schedule: Name = '1f1b', *,
        tied: Mapping[str, Parameter] | None = None, recompute: bool = False,
        communicator: CommunicatorBase | None = None,
    ) -> None:
        self._model = RankModel(model, lossfun)
        chain_list = self._model.chain_list
        if chain_list is not None:
            communicator = chain_list._comm
            chain_list._is_pipelined = True
        elif communicator is None:
            raise ValueError(
                'Pipeline: the model contains no MultiNodeChainList. Pass communicator=comm, or '
                'add the links of this rank to a MultiNodeChainList.')
        self._comm = as_communicator(communicator, 'Pipeline(model, lossfun, communicator=comm)')
        with raise_on_all_ranks(self._comm, 'Pipeline'):
            if not is_integer(n_micro_batches) or n_micro_batches < 1:
                raise ValueError('Pipeline: n_micro_batches must be a positive integer, not '
                                 f'{n_micro_batches!r}')
            if schedule not in NAMES:
                raise ValueError(f'Pipeline: schedule must be one of {NAMES}, not {schedule!r}')
            if tied is not None and not isinstance(tied, Mapping):
                raise TypeError('Pipeline: tied must be a dict of parameters by name, such as '
                                "tied={'W': embed.W}, not "
                                f'{type(tied).__name__}')
            known = {id(param) for param in self._model.params()}
            for name, param in (tied or {}).items():
                if id(param) not in known:
                    raise ValueError(f'Pipeline: the tied parameter {name!r} is not a parameter of '
                                     'the model on this rank')
        self.n_micro_batches: int = n_micro_batches
        self.schedule: Name = schedule
        self._tied_params = dict(tied or {})
        self._recompute = recompute
        self._plan: _Plan | None = None  # created by the first call
        self._transfers = Transfers()
        self._caller = Caller('Pipeline')
        self._caller.remember_place()
        self._n_calls = 0
        self._has_warned = False  # of targets that differ between ranks

    def __call__(self, *args: Object, **kwds: Object) -> Variable:
        """Return the loss of a batch. Collective: every rank calls it.

        Args:
            args: With ``lossfun``, the inputs of the model and the target, or ``None`` for each one
                that this rank does not use. Without ``lossfun``, the arguments of ``model`` on this
                rank. Ranks with the inputs or the output of the model pass the same number of
                examples. Other ranks may pass anything. Arrays have one example per row, lists one
                per element. Tuples and dicts contain arrays or lists.
            kwds: Keyword arguments of the model, like ``args``. The target cannot be one of them.

        Returns:
            On all ranks, the mean loss over all examples: a Variable of shape ``()`` with the dtype
            of the loss. Reported values, such as the accuracy, are also means over all examples and
            are reported on all ranks.

        Raises:
            ValueError: On all ranks, if the ``rank_in`` and ``rank_out`` of the links do not match,
                or if the numbers of examples differ.
            RuntimeError: On all ranks, if the output of a stage differs when it is recomputed.
        """
        plan = self._connected()
        self._n_calls += 1
        collected = Collected(self._model.params())
        n_examples, scale = self._compare_batches(plan, (args, kwds), collected)
        bounds = micro_batches.bounds(n_examples, self.n_micro_batches)
        parts = [micro_batches.part((args, kwds), *each) for each in bounds]
        work = Work(
            self._model.link_of,
            lambda stage, k, received: self._model.compute(stage, parts[k], received),
            [(end - begin) / max(n_examples, 1) or 1. for begin, end in bounds], scale or 1.,
            collected.add, self._recompute)
        execution = Execution(self._comm, plan.stages, work, StageMessages(
            self._comm, plan.stages, self._n_calls, self._transfers))
        has_backprop = bool(chainer.config.enable_backprop)
        # Without a MultiNodeChainList, each rank is one stage that sends its own messages, so run
        # all forward passes first.
        schedule = self.schedule if self._model.chain_list is not None else 'gpipe'
        with collected.collecting() if has_backprop else contextlib.nullcontext():
            execution.run(steps_of(self._comm.rank, clock_cycles(
                plan.stages, len(bounds), schedule, has_backprop)))
        if has_backprop:
            plan.tied.add(collected.params, collected.grads)
        is_finite = scale is None or collected.is_finite()
        value, are_finite = self._total(execution, is_finite)
        if not are_finite:
            collected.make_infinite()
        return collected.loss(value, scale or 1.)

    def __getattr__(self, name: str) -> NoReturn:
        """Explain that a Pipeline does not have the attributes of models and optimizers."""
        raise AttributeError(
            f'Pipeline has no attribute {name!r}. A Pipeline is a loss function, not a model. Call '
            'optimizer.setup(model), then optimizer.update(pipeline, *batch).', name=name, obj=self)

    def gradient_clipping(self, threshold: float) -> GradientClipping:
        """Return a hook that clips the gradients of all stages by their global norm.

        ``chainer.optimizer_hooks.GradientClipping`` would clip each stage by its own norm.

        Args:
            threshold: Maximum L2 norm of all gradients together.

        Returns:
            A hook for ``optimizer.add_hook``. Add it on all ranks.

        Raises:
            TypeError: On all ranks, if ``threshold`` is not a non-negative number.

        Example:
            >>> chain = chainermn.MultiNodeChainList(comm)
            >>> chain.add_link(L.Linear(3, 2), rank_in=None if comm.rank == 0 else 0,
            ...                rank_out=1 if comm.rank == 0 else None)
            >>> optimizer = chainer.optimizers.SGD().setup(chain)
            >>> optimizer.add_hook(chainermn.Pipeline(chain).gradient_clipping(5))
        """
        if not isinstance(threshold, numbers.Real) or not threshold >= 0:
            is_hook = isinstance(threshold, chainer.Optimizer)
            self._comm.refuse('Pipeline.gradient_clipping', TypeError(
                'Pipeline: gradient_clipping is not a hook; it returns one. Call '
                'optimizer.add_hook(pipeline.gradient_clipping(5)).' if is_hook else
                f'Pipeline: threshold must be a non-negative number, not {threshold!r}'))
        return GradientClipping(
            self._comm, threshold,
            lambda param: self._plan is None or self._plan.tied.is_counted(param))

    def _connected(self) -> _Plan:
        """Return the stages and tied parameters of all ranks."""
        if self._plan is None:
            comm = self._comm
            # The name tells a first call apart from calls of another Pipeline on other ranks.
            with comm.called_by('the first call of a Pipeline'):
                parts, tied_by_rank = zip(*comm.allgather_obj((
                    self._model.parts(), descriptions(self._tied_params))), strict=True)
            try:
                stages = connect(parts)
            except ValueError as error:
                raise on_all_ranks(comm, error) from None
            tied = Tied(comm, self._tied_params, tied_by_rank)
            tied.bcast()
            self._plan = _Plan(stages, tied)
        return self._plan

    def _compare_batches(self, plan: _Plan, batch: Batch, collected: Collected
               ) -> tuple[int, float | None]:
        """Compare the batches of all ranks. Return the number of examples and the loss scale."""
        comm = self._comm
        local = [stage for stage in plan.stages if stage.rank == comm.rank]
        n_examples, target = None, None
        with raise_together(comm, 'Pipeline'):
            if any(stage.has_inputs or stage.has_output for stage in local):
                self._model.check(batch, any(stage.has_inputs for stage in local))
                n_examples = micro_batches.count(batch)
                if self._model.has_target and self._n_calls <= targets.N_COMPARED:
                    target = targets.digest(batch[0][-1])
        with comm.called_by(self._caller):
            counts, digests, scales, options = zip(*comm.allgather_obj((
                n_examples, target, loss_scale(collected.params),
                {'n_micro_batches': self.n_micro_batches, 'schedule': self.schedule,
                 'chainer.config.enable_backprop': bool(chainer.config.enable_backprop)})),
                strict=True)
        check_equal(comm, options, 'Pipeline: the options differ between ranks', (
            'Pass the same options on all ranks, and evaluate in chainer.no_backprop_mode() on all '
            'ranks or on none.'))
        known = {rank: count for rank, count in enumerate(counts) if count is not None}
        if len(set(known.values())) != 1:
            check_equal(
                comm, ['no examples' if count is None else f'{count} examples' for count in counts],
                'Pipeline: the numbers of examples differ between ranks',
                'Pass the same batch on all ranks that have inputs or the output of the model.')
            raise on_all_ranks(comm, ValueError(
                'Pipeline: no rank passed a batch. Pass the inputs of the model and the target on '
                'the ranks that use them.'))
        if comm.rank == 0 and not self._has_warned:
            self._has_warned = targets.warn_of_differences(digests)
        return next(iter(known.values())), next(filter(None, scales), None)

    def _total(self, execution: Execution, is_finite: bool) -> tuple[Array, bool]:
        """Report the observations. Return the loss and whether all gradients are finite."""
        loss = execution.loss
        with self._comm.called_by(self._caller):
            losses, means, finite, differences = zip(*self._comm.allgather_obj((
                None if loss is None else (float(loss), loss.dtype.str),
                execution.observations.means(), is_finite, execution.difference())), strict=True)
        if text := next(filter(None, differences), None):
            raise on_all_ranks(self._comm, RuntimeError(_NOT_RECOMPUTED.format(text)))
        observations.report([*means, means[self._comm.rank]])
        found = [each for each in losses if each is not None]
        total = np.array(sum(value for value, _ in found), found[0][1] if found else 'f')
        return self._model.model.device.send(total), all(finite)


class _Plan(NamedTuple):
    """The stages and tied parameters of all ranks."""

    stages: tuple[Stage, ...]
    tied: Tied
