"""Sharded optimizer states (ZeRO stage 1): each rank updates its shard of the parameters.

Each rank gets the mean gradients of its shard, calls the hooks of the optimizer, and updates its
shard. It stores the state of the update rules only for this shard. Then the updated shards are sent
to all ranks. If a hook needs the gradients of all parameters, each rank gets all mean gradients.

An update rule that computes each element independently updates a piece of a parameter: a flat array
that shares memory with the parameter. Other rules, and rules with hooks, update the complete
parameter on one rank. Parameters that share memory with each other are not sharded: every rank
updates them.
"""
from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import chainer
import numpy as np

from chainer_compat.updates import one_pass, sharded_states
from chainer_compat.updates.sharded_states import StateShard
from chainermn._gradients import tied_arrays
from chainermn._operations.call_signature import Caller
from chainermn._operations.on_all_ranks import check_equal
from chainermn._process import environment, runtime
from chainermn._types import Array, Model, Object, Optimizer, Parameter, Serializer, UpdateRule
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.optimizers._elementwise_rules import is_elementwise
from chainermn.optimizers._full_update import FullUpdate, as_updated, with_rules
from chainermn.optimizers._sharded_states import shard_hooks
from chainermn.optimizers._sharded_states.partition import Item, Range, Shard, partition
from chainermn.optimizers._sharded_states.shard_hooks import ShardedParameter

#: Name of the float32 copy of a float16 parameter among the arrays of a state.
_FP32 = 'float32 copy'


class _StateElements(NamedTuple):
    """The elements to which the state of a rule belongs."""

    elements: Range
    owner: object  # identifies the ShardedUpdate of the partition; None if the state was loaded


class _RuleState(NamedTuple):
    """The state of a rule on one rank."""

    elements: Range | None  # the elements to which the state belongs; None for all
    has_state: bool
    t: int


class _States(runtime.ProcessState):
    def __init__(self) -> None:
        #: The elements of each rule whose state may be partial. Keyed by rule for the whole
        #: process, because two optimizers can share a rule.
        self.by_rule: weakref.WeakKeyDictionary[UpdateRule, _StateElements] = (
            weakref.WeakKeyDictionary())

    def in_child(self) -> bool:
        return True  # the child may save the optimizer


class ShardedUpdate(FullUpdate):
    """Each rank updates its shard of the parameters and stores the states of the shard.

    Args:
        communicator: The communicator of the ranks that share the states.
        caller: The caller that stands for the optimizer. A description of each update rule is added
            to its options.
    """

    def __init__(self, communicator: CommunicatorBase, caller: Caller) -> None:
        self._communicator = communicator
        self._caller = caller
        self._options = caller.options
        self._items: list[Item] = []
        self._rules: list[UpdateRule] = []
        self._shards: list[Shard] = []
        #: For each parameter, the elements that this rank updates.
        self._elements: Shard = {}
        self._pieces: dict[str, Parameter] = {}  # the elements of this rank's shard
        self._local_needs_all = False
        self._needs_all = False  # whether any rank needs all gradients
        self._owner = object()
        self._state_elements = runtime.get(_States).by_rule
        self._has_debug_variable = environment.flag(environment.DEBUG)

    def clear(self) -> None:
        self._items, self._rules, self._shards, self._elements, self._pieces = [], [], [], {}, {}

    def begin(self, optimizer: Optimizer) -> None:
        self.prepare(optimizer)

    def prepare(self, optimizer: Optimizer) -> None:
        """Partition the parameters if they or their states have changed since the last call.

        Collective if they have changed, or if hooks now need all gradients or no longer need them:
        every rank calls it.

        Args:
            optimizer: The optimizer.

        Raises:
            ValueError: On all ranks, if parameters or update rules changed on some ranks only, or
                if the ranks have loaded different snapshots.
        """
        params = with_rules(optimizer.target)
        needs_all = (self._has_debug_variable or chainer.is_debug()
                     or shard_hooks.needs_all(_wrapped(optimizer)))
        arrays = [param.array for param in params.values()]
        tied = {i for group in tied_arrays.sharing_memory(arrays) for i in group}
        items = [Item(path, param.size, _is_divisible(param.update_rule),
                      param.update_rule.enabled, i in tied)
                 for i, (path, param) in enumerate(params.items())]
        rules = [param.update_rule for param in params.values()]
        if items == self._items and rules == self._rules and (
                needs_all == self._local_needs_all) and all(
                rule in self._state_elements
                and self._state_elements[rule].owner is self._owner for rule in rules):
            return
        comm = self._communicator
        self._describe(items)
        try:
            found, by_rank = zip(*comm.allgather_obj(
                ([self._find(rule) for rule in rules], needs_all)), strict=True)
        except Exception:  # only this rank may have changed, and the change may be undone
            self._describe(self._items)
            raise
        self.clear()  # so that the next call starts again after an error
        self._shards = partition(items, comm.size)
        self._elements = {path: self._shards[comm.rank].get(path, (0, 0)) for path in params}
        by_param = zip(*found, strict=True)
        for (path, param), states in zip(params.items(), by_param, strict=True):
            begin, end = self._elements[path]
            is_complete = end - begin == param.size
            self._pieces[path] = param if is_complete else _piece(param, begin, end)
            self._distribute(path, param, states)
        self._local_needs_all, self._needs_all = needs_all, any(by_rank)
        self._items, self._rules = items, rules

    def _describe(self, items: Sequence[Item]) -> None:
        """Make the ranks compare the update rules."""
        self._caller.set_options(self._options | {
            f'update rule of {item.path}': item.description for item in items})

    def shards(self) -> Sequence[Shard] | None:
        return None if self._needs_all else self._shards

    def update(self, optimizer: Optimizer, *args: Object, **kwds: Object) -> None:
        """Step like ``GradientMethod.update``, but update only this rank's shard, then share it."""
        optimizer = _wrapped(optimizer)
        params = with_rules(optimizer.target)
        paths = {id(param): path for path, param in params.items()}
        try:
            optimizer.reallocate_cleared_grads()
            if self._needs_all:
                optimizer.check_nan_in_grads()
                optimizer.call_hooks('pre')
                cut = self._cut(params)
            else:
                cut = self._cut(params)
                sharded = (self._sharded_parameters(optimizer.target, paths)
                           if shard_hooks.needs_parameters(optimizer) else [])
                shard_hooks.check_finite(optimizer, sharded, self._total)
                shard_hooks.call(optimizer, sharded, self._total)
            optimizer.t += 1
            if optimizer.is_safe_to_update():
                self._update([(param, paths.get(id(param)))
                              for param in optimizer.target.params()], cut)
            for path in cut:
                self._pieces[path].grad = None
            optimizer.reallocate_cleared_grads()
        except Exception as error:  # the other ranks wait for this rank
            self._communicator.refuse('update', error)
        self._allgather(params)
        optimizer.call_hooks('post')
        optimizer.update_loss_scale()

    def gather(self, optimizer: Optimizer) -> dict[str, dict[str, Object]]:
        self.prepare(optimizer)
        params = with_rules(optimizer.target)
        with self._communicator.called_by('gather_states'):
            by_rank = self._communicator.allgather_obj({
                path: StateShard(*self._elements[path], param.update_rule.state or {})
                for path, param in params.items()})
        return {path: sharded_states.join(path, param.shape, [states[path] for states in by_rank])
                for path, param in params.items()}

    def serialize(self, optimizer: Optimizer, serializer: Serializer, is_root: bool) -> None:
        """Save or load the optimizer and the elements that each state on this rank covers."""
        is_loading = isinstance(serializer, chainer.Deserializer)
        if is_loading:
            self._begin_loading(optimizer.target, sharded_states.load_shard(
                serializer, optimizer.target))
        optimizer.serialize(serializer)
        for path, param in () if is_loading else optimizer.target.namedparams():
            if param.update_rule in self._state_elements:
                serializer[path](sharded_states.ENTRY, np.array(
                    [*self._state_elements[param.update_rule].elements, *param.shape]))

    def common(self, saved: Mapping[str, Object]) -> dict[str, Object]:
        return {key: value for key, value in saved.items() if key.split('/')[-1] in ('t', 'epoch')}

    def _begin_loading(self, target: Model, loaded: Shard) -> None:
        """Drop all states, because the states in the snapshot may have different lengths.

        Args:
            target: The model.
            loaded: The elements to which the states in the snapshot belong.
        """
        self.clear()
        for path, param in target.namedparams():
            rule = param.update_rule
            if rule is not None:
                rule._state = rule._fp32_param = None
                self._state_elements.pop(rule, None)
                if path in loaded:
                    self._state_elements[rule] = _StateElements(loaded[path], None)

    def _cut(self, params: Mapping[str, Parameter]) -> dict[str, Array]:
        """Set the pieces to this rank's elements of the parameters and gradients.

        Returns:
            The elements of the parameters, which are copies if the arrays are not contiguous.
        """
        found = {}
        for path, param in params.items():
            piece = self._pieces[path]
            # Set the scale even on ranks without elements, because hooks sum over all ranks.
            piece._loss_scale = param._loss_scale
            if piece is not param and piece.size:
                elements = slice(*self._elements[path])
                piece.array = found[path] = param.array.reshape(-1)[elements]
                piece.grad = None if param.grad is None else param.grad.reshape(-1)[elements]
        return found

    def _sharded_parameters(self, target: Model, paths: Mapping[int, str]
                            ) -> list[ShardedParameter]:
        """Return the initialized parameters. Only rank 0 includes unsharded ones in norms."""
        sharded = {item.path for item in self._items if not item.is_tied}
        is_first = self._communicator.rank == 0
        found = []
        for path, param in target.namedparams(include_uninit=False):
            known = paths.get(id(param), '')
            found.append(ShardedParameter(path, param, self._pieces.get(known, param),
                                          known in sharded or is_first))
        return found

    def _total(self, values: np.ndarray) -> np.ndarray:
        with self._communicator.called_by(self._caller):
            return self._communicator.allreduce(values)

    def _update(self, params: Sequence[tuple[Parameter, str | None]], cut: Mapping[str, Array]
                ) -> None:
        """Update this rank's elements. The path is ``None`` for parameters that are not updated."""
        pieces = []
        for param, path in params:
            rule, piece = param.update_rule, param if path is None else self._pieces[path]
            if piece is param or piece.size:
                piece.update_rule = rule
                pieces.append(piece)
            else:
                rule.t += rule.enabled
        one_pass.update(pieces)
        for param, path in params:
            if path is not None and self._pieces[path] is not param and self._pieces[path].size:
                self._write_back(param, path, cut)

    def _write_back(self, param: Parameter, path: str, cut: Mapping[str, Array]) -> None:
        """Write the elements of a piece to the parameter, unless they share memory."""
        piece = self._pieces[path]
        if not param.array.flags.c_contiguous:
            flat = param.array.reshape(-1)
            flat[slice(*self._elements[path])] = piece.array
            param.array[...] = flat.reshape(param.shape)
        elif piece.array is not cut[path]:
            cut[path][...] = piece.array

    def _allgather(self, params: Mapping[str, Parameter]) -> None:
        sharded = [item.path for item in self._items
                   if params[item.path].update_rule.enabled and not item.is_tied]
        flat = {path: params[path].array.reshape(-1) for path in sharded}
        shards = [[flat[path][begin:end] for path, (begin, end) in shard.items() if path in flat]
                  for shard in self._shards]
        if any(shards):
            with self._communicator.called_by(self._caller):
                self._communicator._chainermn_channel.allgather_shards(shards)
        for path, elements in flat.items():
            array = params[path].array
            if not array.flags.c_contiguous:
                array[...] = elements.reshape(array.shape)

    def _find(self, rule: UpdateRule) -> _RuleState:
        found = self._state_elements.get(rule)
        return _RuleState(None if found is None else found.elements, rule.state is not None, rule.t)

    def _distribute(self, path: str, param: Parameter, states: Sequence[_RuleState]) -> None:
        """Set the state of this rank's elements of a parameter.

        Collective if a rank needs parts of the state from other ranks: every rank calls it.

        Args:
            path: Path of the parameter.
            param: The parameter.
            states: The state on each rank.
        """
        rule, piece, comm = param.update_rule, self._pieces[path], self._communicator
        check_equal(comm, [f'{state.t} updates' for state in states],
                    f'the states of {path} were saved after different numbers of updates',
                    'Load the same snapshot on all ranks.')
        wanted = [shard.get(path, (0, 0)) for shard in self._shards]
        begin, end = wanted[comm.rank]
        if any(state.has_state for state in states) and not all(
                state.has_state and state.elements == elements
                for state, elements in zip(states, wanted, strict=True)):
            state = _state_of(rule)
            if not all(each.has_state and each.elements is None for each in states):
                first, last = states[comm.rank].elements or (0, param.size)
                mine = StateShard(first, last, state) if rule.state is not None else None
                state = sharded_states.join(path, param.shape, (
                    part for part in comm.allgather_obj(mine) if part is not None))
            if piece is not param:
                state = {key: value.reshape(-1)[begin:end].reshape(piece.shape).copy()
                         if sharded_states.has_size(value, param.size) else value
                         for key, value in state.items()}
            copy = state.pop(_FP32, None)
            rule._fp32_param = None if copy is None else chainer.Parameter(
                chainer.backend.get_device_from_array(param.array).send(copy))
            rule._state = state or None
        self._state_elements[rule] = _StateElements((begin, end), self._owner)
        if rule.enabled:
            rule._init_states(as_updated(rule, piece))


def _wrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that changes the parameters, which may be inside a wrapper."""
    return optimizer.update.__self__


def _is_divisible(rule: UpdateRule) -> bool:
    hookable = rule._hookable
    return is_elementwise(rule) and not (
        hookable._pre_update_hooks or hookable._post_update_hooks)


def _piece(param: Parameter, begin: int, end: int) -> Parameter:
    """Return a flat piece of a parameter. An empty piece has the axes of the parameter."""
    array = param.array.reshape(-1)[begin:end] if begin < end or not param.ndim else param.array[:0]
    piece = chainer.Parameter(array, name=param.name)
    piece.grad = None
    return piece


def _state_of(rule: UpdateRule) -> dict[str, Object]:
    copy = rule._fp32_param
    return {**(rule.state or {}), **({} if copy is None else {_FP32: copy.array})}
