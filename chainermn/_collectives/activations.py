"""Messages of chainermn.functions: activations in the forward pass, gradients in the backward pass.

A mark on each message distinguishes activations from gradients. The mark of an activation tells
the receiver whether to send its gradient back.
"""
from __future__ import annotations

import itertools
import threading
from typing import NamedTuple

from chainermn._collectives.message_parts import Mark, unexpected
from chainermn._collectives.point_to_point import Messages
from chainermn._diagnostics import call_site
from chainermn._operations.message_header import Kind
from chainermn._operations.table import BACKWARD_OF_RECV, BACKWARD_OF_SEND, RECV, SEND
from chainermn._types import Arrays


class Activation(NamedTuple):
    """Data that was sent between two ranks, as seen by one of them."""

    peer: int
    tag: int
    number: int  # unique on the sender; -1 if ``comm.send`` sent it without a mark
    needs_gradient: bool
    call: str  # the call of send or recv
    caller: str = ''  # the part of ChainerMN that called it, or the call site in user code


class Activations:
    """Sends and receives activations and gradients.

    Args:
        messages: The messages of the communicator.
    """

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self._numbers = itertools.count()
        # Gradients that arrived out of order, by rank and number, until a thread asks for them.
        self._early: dict[tuple[int, int], Arrays] = {}
        self._receiving: set[tuple[int, int]] = set()  # ranks and tags that a thread receives from
        self._changed = threading.Condition()

    def send(self, data: Arrays, dest: int, tag: int, needs_gradient: bool, caller: str = ''
             ) -> Activation:
        """Send an activation; return once the receiver has begun to receive it."""
        site = call_site.locate()
        call = _call(caller, f'send to rank {dest} with tag {tag}', site)
        number = next(self._numbers)
        self._messages.send_marked(
            SEND, Mark(Kind.ACTIVATION, number, needs_gradient, call), data, dest, tag, caller)
        return Activation(dest, tag, number, needs_gradient, call, caller or f'the send at {site}')

    def recv(self, source: int, tag: int, caller: str = '') -> tuple[Arrays, Activation]:
        """Receive an activation."""
        site = call_site.locate()
        call = _call(caller, f'recv from rank {source} with tag {tag}', site)
        mark, data, source, tag = self._messages.recv_marked(RECV, source, tag, caller)
        caller = caller or f'the recv at {site}'
        if mark is None:
            return data, Activation(source, tag, -1, True, call, caller)
        if mark.kind is Kind.GRADIENT:
            raise unexpected(self._messages.rank, mark, source, call)
        return data, Activation(source, tag, mark.number, mark.needs_gradient, call, caller)

    def send_gradient(self, gradients: Arrays, activation: Activation) -> None:
        """Send the gradient of an activation to its sender, if needed."""
        peer, tag, number, needs_gradient, forward, caller = activation
        if number < 0:
            self._messages.send(gradients, peer, tag)
        elif needs_gradient:
            call = f'backward, called at {call_site.locate()}, sends the gradient of {forward}'
            self._messages.send_marked(
                BACKWARD_OF_RECV, Mark(Kind.GRADIENT, number, False, call), gradients, peer, tag,
                caller)

    def recv_gradient(self, activation: Activation) -> Arrays:
        """Receive the gradient of an activation."""
        peer, tag, number, _, forward, caller = activation
        call = f'backward, called at {call_site.locate()}, waits for the gradient of {forward}'
        while not self._has_arrived(peer, number, tag):
            try:
                mark, gradients, _, _ = self._messages.recv_marked(
                    BACKWARD_OF_SEND, peer, tag, caller)
                if mark is None:
                    return gradients
                if mark.kind is Kind.ACTIVATION:
                    raise unexpected(self._messages.rank, mark, peer, call)
                self._early[peer, mark.number] = gradients
            finally:
                with self._changed:
                    self._receiving.discard((peer, tag))
                    self._changed.notify_all()
        return self._early.pop((peer, number))

    def _has_arrived(self, peer: int, number: int, tag: int) -> bool:
        """Return whether a gradient has arrived; if not, this thread must receive the next one."""
        with self._changed:
            while (peer, number) not in self._early:
                if (peer, tag) not in self._receiving:
                    self._receiving.add((peer, tag))
                    return False
                self._changed.wait()
            return True


def _call(caller: str, text: str, site: str) -> str:
    """Describe a call for errors."""
    return f'{caller}: ' * bool(caller) + f'{text}, called at {site}'
