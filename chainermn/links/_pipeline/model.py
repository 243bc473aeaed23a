"""The model of one rank: the list of its links and the user code around the list."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn, TypeAlias

import chainer
from chainer.utils.type_check import InvalidType

from chainermn._operations.common_error import add_note, program_line
from chainermn._process import environment
from chainermn._types import Model, Object, Parameter, Variable
from chainermn.links._pipeline.stages import ListedLink, Stage
from chainermn.links.multi_node_chain_list import MultiNodeChainList, Value

#: The arguments of a micro-batch, including keyword arguments.
Batch: TypeAlias = tuple[tuple[Object, ...], dict[str, Object]]

_TARGET = ('Without lossfun, Pipeline passes all arguments to the first link. If the last argument '
           'is the target, pass lossfun, or pass no target on ranks that do not compute the loss.')


class RankModel:
    """Runs the links of a model one by one.

    Args:
        model: A MultiNodeChainList; a link that contains one, such as ``L.Classifier``; or any
            other link, which is run as a whole.
        lossfun: Function that computes the loss from the output and the last argument; ``None`` if
            the output is the loss.
    """

    def __init__(self, model: Model, lossfun: Callable[..., Variable] | None) -> None:
        if not isinstance(model, chainer.Link):
            raise TypeError(f'Pipeline: model must be a chainer.Link, not {model!r}')
        lists = [link for link in model.links() if isinstance(link, MultiNodeChainList)]
        if len(lists) > 1:
            raise ValueError(f'Pipeline: the model contains {len(lists)} MultiNodeChainLists. '
                             'Add all links to one of them.')
        if lossfun is not None and not callable(lossfun):
            raise TypeError(f'Pipeline: lossfun must be a function, not {lossfun!r}')
        if lossfun is not None and not lists:
            raise ValueError('Pipeline: a model without a MultiNodeChainList must return the loss '
                             'itself; omit lossfun.')
        self.model, self._lossfun = model, lossfun
        #: Whether the last argument of a batch is its target.
        self.has_target = lossfun is not None
        self.chain_list: MultiNodeChainList | None = lists[0] if lists else None
        #: Whether there is user code around the list.
        self._is_wrapped = self.chain_list is not None and (
            model is not self.chain_list or type(model).forward is not MultiNodeChainList.forward)

    def params(self) -> list[Parameter]:
        """Return the parameters, each once, including those of a loss function that is a link."""
        links = [each for each in (self.model, self._lossfun) if isinstance(each, chainer.Link)]
        return [*{id(param): param for link in links for param in link.params()}.values()]

    def parts(self) -> list[ListedLink]:
        """Describe the links."""
        if self.chain_list is None:
            return [ListedLink(type(self.model).__name__, None, None)]
        return [ListedLink(name, ranks_in, ranks_out)
                for name, ranks_in, ranks_out in self.chain_list._described_parts()]

    def check(self, batch: Batch, has_inputs: bool) -> None:
        """Raise ValueError if the target is missing or is the only argument.

        Args:
            batch: The arguments of the whole batch.
            has_inputs: Whether this rank has inputs of the model.
        """
        args, kwds = batch
        if self._lossfun is not None and len(args) < 1 + (has_inputs and not kwds):
            raise ValueError(
                f'Pipeline: got {len(args)} positional and {len(kwds)} keyword arguments, but '
                'the last positional argument must be the target for lossfun. Pass the inputs of '
                'the model, then the target, and None for each one that this rank does not use.')

    def compute(self, stage: Stage, batch: Batch, received: Sequence[Value]) -> Value:
        """Return the output of a stage, or the loss if it is the output stage of the model."""
        args, kwds = batch
        if self._lossfun is not None:
            args = args[:-1]
        forget_states(self.model)
        if self.chain_list is None:
            y = self.model(*args, **kwds)
        else:
            inputs = self._inputs(args, kwds) if stage.has_inputs else (tuple(received), {})
            link = self.chain_list[stage.position]
            try:
                y = link(*inputs[0], **inputs[1])
            except Exception as error:
                may_be_target = stage.has_inputs and len(args) > 1 and (
                    self._lossfun is None and not self._is_wrapped)
                if may_be_target and not program_line(error) and not isinstance(error, InvalidType):
                    raise TypeError(
                        f'Pipeline: {_TARGET}\n{type(link).__name__} raised '
                        f'{type(error).__name__}: {error}'
                    ) from (error if environment.flag(environment.DEBUG) else None)
                if may_be_target:
                    add_note(error, _TARGET)
                raise
        return self._loss(batch, args, y) if stage.has_output else y

    def link_of(self, stage: Stage) -> Model:
        """Return the link whose state a stage uses: the model if it includes user code."""
        if self.chain_list is None or (stage.has_inputs and self._is_wrapped):
            return self.model
        return self.chain_list[stage.position]

    def _inputs(self, args: tuple[Object, ...], kwds: dict[str, Object]) -> Batch:
        """Return the arguments with which the model calls the list."""
        assert self.chain_list is not None
        if not self._is_wrapped:
            return args, kwds
        with self.chain_list._replaced(_stop):
            try:
                self.model(*args, **kwds)
            except _CalledWith as called:
                return called.batch
        raise ValueError(f'Pipeline: {type(self.model).__name__} does not call the '
                         'MultiNodeChainList that it contains')

    def _loss(self, batch: Batch, args: tuple[Object, ...], y: Value) -> Variable:
        """Return the loss of a micro-batch, given the output of the last stage."""
        result = y
        if self._is_wrapped:
            assert self.chain_list is not None
            with self.chain_list._replaced(lambda *_, **__: y):
                result = self.model(*args, **batch[1])
        if self._lossfun is not None:
            result = self._lossfun(result, batch[0][-1])
        if not isinstance(result, chainer.Variable) or result.size > 1 or (
                result.size == 0 and self.chain_list is not None):
            shape = f' of shape {result.shape}' if hasattr(result, 'shape') else ''
            raise TypeError(
                f'Pipeline: the loss must be a scalar Variable, not {type(result).__name__}{shape}'
                '. ' + ('Return a scalar, such as F.mean(loss).' if self._lossfun is not None else
                   'Pass lossfun, which computes the loss from the output of the model.'))
        if self.model is self.chain_list or self._lossfun is not None:
            self._report(result)
        return result

    def _report(self, loss: Variable) -> None:
        reporters = chainer.reporter._get_reporters()
        if reporters and id(self.model) in reporters[-1]._observer_names:
            chainer.report({'loss': loss}, self.model)


class _CalledWith(Exception):  # noqa: N818  (not an error)
    """Carries the inputs of a list out of the user code around the list."""

    def __init__(self, batch: Batch) -> None:
        super().__init__()
        self.batch = batch


def _stop(*args: Object, **kwds: Object) -> Value:
    raise _CalledWith((args, kwds))


def forget_states(model: Model) -> None:
    """Make links such as ``L.LSTM`` raise an error if they use their current state.

    The state of one micro-batch must not be used for another one.
    """
    for link in model.links():
        if hasattr(link, 'reset_state'):
            for name, value in [*vars(link).items()]:
                if isinstance(value, chainer.Variable) and not isinstance(value, chainer.Parameter):
                    setattr(link, name, _StateOfAnotherMicroBatch(type(link).__name__))


class _StateOfAnotherMicroBatch:
    """Takes the place of a state and raises an error when it is used."""

    def __init__(self, link: str) -> None:
        self._link = link

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith('__'):
            raise AttributeError(name)
        raise RuntimeError(
            f'Pipeline: {self._link} still has the state of another micro-batch, which has '
            'different examples. Call its reset_state() in forward before its first step.')
