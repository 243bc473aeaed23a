"""``dist_async``: each rank pushes and pulls when it likes, and waits for no other."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.kvstore import _messages
from chainermn.kvstore._dist_kvstore import DistKVStore
from chainermn.kvstore._layout import Layout
from chainermn.kvstore._messages import Entry

_PUSH, _PULL = bytes(8), bytes([1, *bytes(7)])  # what a request begins with: eight bytes

#: What a rank does alone.
_ALONE = ('push', 'pull', 'row_sparse_pull')


class DistAsyncKVStore(DistKVStore):
    """A store that merges what is pushed when it arrives.  Each rank serves its keys in a thread.

    ``push``, ``pull`` and ``row_sparse_pull`` are not collective, and their errors are raised on
    the rank that calls them; the other methods are collective.
    """

    def __init__(self, type: str, communicator: CommunicatorBase, bigarray_bound: float) -> None:
        super().__init__(type, communicator, bigarray_bound)
        self._service = communicator.serve(self._serve)

    def close(self) -> None:
        self._service.close()

    def _push(self, layouts: Sequence[Layout], values: Sequence[Any]) -> None:
        self._ask(_PUSH, self._pushed(layouts, values))

    def _pull(self, layouts: Sequence[Layout], row_ids: Sequence[Sequence[Any]]
              ) -> list[list[Any]]:
        answers = self._ask(_PULL, self._asked(layouts, row_ids))
        return self._assembled(layouts, row_ids, answers)

    def _ask(self, verb: bytes, messages: dict[int, list[Entry]]) -> dict[int, Any]:
        return self._service.ask({server: [verb, *_messages.buffers(entries)]
                                  for server, entries in messages.items() if entries})

    def _serve(self, source: int, request: Any) -> list[Any]:
        """Runs in the thread of the service, or in that of a worker on this rank."""
        verb, request = request[:8].tobytes(), request[8:]
        if verb == _PULL:
            return self._answer(request)
        for entry in _messages.entries(request):
            layout = self._server.layouts[entry.number]
            self._server.update(layout.number, [self._server.received(layout, entry)])
        return []

    def _refuse(self, verb: str, error: Exception) -> NoReturn:
        if verb in _ALONE:
            raise error
        super()._refuse(verb, error)
