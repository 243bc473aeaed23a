"""``dist_sync`` and ``dist_device_sync``: all ranks push together, and pull together."""
from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.kvstore import _messages
from chainermn.kvstore._dist_kvstore import DistKVStore, agree
from chainermn.kvstore._layout import Layout

_DIGEST = 8


class DistSyncKVStore(DistKVStore):
    """A store in which what all ranks push is summed and merged once.

    What a rank sends to the others begins with a digest of the call, so that ranks that push or
    pull other keys are noticed before anything is merged.
    """

    def __init__(self, type: str, communicator: CommunicatorBase, bigarray_bound: float,
                 on_device: bool) -> None:
        super().__init__(type, communicator, bigarray_bound)
        self._on_device = on_device

    def _push(self, layouts: Sequence[Layout], values: Sequence[Any]) -> None:
        messages = [_messages.buffers(entries)
                    for entries in self._pushed(layouts, values).values()]
        received = self._exchanged('push', layouts, messages)
        try:
            for of_all in zip(*map(_messages.entries, received), strict=True):
                layout = self._server.layouts[of_all[0].number]
                self._server.update(layout.number, [
                    self._server.received(layout, entry) for entry in of_all])
        except Exception as error:  # of the updater
            self._refuse('push', error)

    def _pull(self, layouts: Sequence[Layout], row_ids: Sequence[Sequence[Any]]
              ) -> list[list[Any]]:
        asked = self._asked(layouts, row_ids)
        if all(ids is None for its_ids in row_ids for ids in its_ids):
            mine = _messages.joined(_messages.buffers(asked[self._rank]))
            digest = _digest('pull', layouts)
            answers = self._checked('pull', layouts, digest, self._comm.allgather(
                _messages.joined([digest, *self._answer(mine)])))
        else:
            questions = self._exchanged('row_sparse_pull', layouts, [
                _messages.buffers(entries) for entries in asked.values()])
            answers = self._exchanged('row_sparse_pull', layouts, [
                self._answer(question) for question in questions])
        return self._assembled(layouts, row_ids, dict(enumerate(answers)))

    def _exchanged(self, verb: str, layouts: Sequence[Layout], messages: Sequence[list[Any]]
                   ) -> list[Any]:
        digest = _digest(verb, layouts)
        return self._checked(verb, layouts, digest, self._comm.alltoall(
            [_messages.joined([digest, *message]) for message in messages]))

    def _checked(self, verb: str, layouts: Sequence[Layout], digest: bytes,
                 received: Sequence[Any]) -> list[Any]:
        """What was received, once it is known that all ranks made the same call."""
        if any(message[:_DIGEST].tobytes() != digest for message in received):
            agree(self._comm, f'KVStore.{verb}', ', '.join(map(str, layouts)))
        return [message[_DIGEST:] for message in received]


def _digest(verb: str, layouts: Sequence[Layout]) -> bytes:
    numbers = np.array([layout.number for layout in layouts], np.int64)
    return hashlib.blake2b(verb.encode() + numbers.tobytes(), digest_size=_DIGEST).digest()
