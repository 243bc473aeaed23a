"""What the stores of several ranks share: which server gets which part of what."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import chainer
import numpy as np

from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.kvstore import _messages
from chainermn.kvstore._kvstore import KVStore
from chainermn.kvstore._layout import Layout
from chainermn.kvstore._messages import Entry
from chainermn.kvstore.row_sparse import RowSparse


class DistKVStore(KVStore):
    """A store that all ranks of a communicator share; each of them is a worker and a server.

    Collective: every rank makes one.
    """

    def __init__(self, type: str, communicator: CommunicatorBase, bigarray_bound: float) -> None:
        super().__init__(type, communicator.rank, communicator.size, bigarray_bound)
        self._comm = communicator

    def barrier(self) -> None:
        self._comm.barrier()

    def _init(self, layouts: Sequence[Layout], values: Sequence[Any]) -> None:
        messages = None
        if self._rank == 0:
            messages = [_messages.joined(_messages.buffers(entries)) for entries in self._pushed(
                layouts, values, compressed=False).values()]
        mine = self._comm.scatter(messages)
        first = len(self._layouts)
        self._server.init(layouts, {
            entry.number: chainer.backend.get_device_from_array(values[entry.number - first]).send(
                np.array(self._server.received(layouts[entry.number - first], entry)))
            for entry in _messages.entries(mine)})
        self._comm.barrier()  # all servers know the keys before one is asked for them

    def _pushed(self, layouts: Sequence[Layout], values: Sequence[Any], compressed: bool = True
                ) -> dict[int, list[Entry]]:
        """Cuts values into what each server gets."""
        found: dict[int, list[Entry]] = {server: [] for server in range(self._num_workers)}
        for layout, x in zip(layouts, values, strict=True):
            for server in layout.parts:
                found[server].append(self._entry(layout, x, server, compressed))
        return found

    def _entry(self, layout: Layout, x: Any, server: int, compressed: bool) -> Entry:
        if isinstance(x, RowSparse):
            rows = layout.rows(server)
            first, last = np.searchsorted(x.row_ids, [rows.start, rows.stop])
            return Entry(layout.number, _messages.ROWS, x.row_ids[first:last], x.rows[first:last])
        part = layout.part(x, server)
        if not compressed or self._compressor is None or layout.dtype.kind != 'f':
            return _messages.dense(layout.number, chainer.cuda.to_cpu(part))
        wire = self._compressor.compress(part.reshape(-1), (layout.key, server))
        return _messages.compressed(layout.number, chainer.cuda.to_cpu(wire))

    def _asked(self, layouts: Sequence[Layout], row_ids: Sequence[Sequence[Any]]
               ) -> dict[int, list[Entry]]:
        """Says what to ask each server for."""
        found: dict[int, list[Entry]] = {server: [] for server in range(self._num_workers)}
        for layout, its_ids in zip(layouts, row_ids, strict=True):
            for server in layout.parts:
                rows = layout.rows(server) if layout.is_row_sparse else range(0)
                for ids in its_ids:
                    if ids is not None:
                        ids = ids[slice(*np.searchsorted(ids, [rows.start, rows.stop]))]
                    found[server].append(_messages.request(layout.number, ids))
        return found

    def _answer(self, asked: Any) -> list[Any]:
        """What this server answers to a message of such entries."""
        return [buffer for entry in _messages.entries(asked)
                for buffer in _messages.padded(self._server.pulled(entry))]

    def _assembled(self, layouts: Sequence[Layout], row_ids: Sequence[Sequence[Any]],
                   answers: dict[int, Any]) -> list[list[Any]]:
        """Puts together what the servers have answered."""
        readers = {server: _messages.Reader(answer) for server, answer in answers.items()}
        found = []
        for layout, its_ids in zip(layouts, row_ids, strict=True):
            its = [np.empty(layout.shape if ids is None else (len(ids), *layout.shape[1:]),
                            layout.dtype) for ids in its_ids]
            for server in layout.parts:
                for ids, x in zip(its_ids, its, strict=True):
                    if ids is None:
                        layout.part(x, server)[...] = readers[server].take(
                            layout.part_shape(server), layout.dtype)
                    else:
                        rows = layout.rows(server)
                        where = slice(*np.searchsorted(ids, [rows.start, rows.stop]))
                        x[where] = readers[server].take(x[where].shape, layout.dtype)
            found.append(its)
        return found

    def _refuse(self, verb: str, error: Exception) -> NoReturn:
        self._comm.refuse(f'KVStore.{verb}', error)

    def _agree(self, verb: str, said: str) -> None:
        agree(self._comm, f'KVStore.{verb}', said)

    def _gather(self, obj: Any) -> list[Any] | None:
        return self._comm.gather_obj(obj)

    def _from_rank_0(self, obj: Any) -> Any:
        return self._comm.bcast_obj(obj)


def agree(comm: CommunicatorBase, verb: str, said: str) -> None:
    """Raises ValueError on all ranks if they do not say the same.  Collective."""
    everybody = comm.allgather_obj(f'{verb} {said}')
    if len(set(everybody)) > 1:
        raise ValueError('\n'.join([
            f'{verb if said else "KVStore"} refused: the ranks do not call the same',
            *(f'  rank {rank}: {text}' for rank, text in enumerate(everybody)),
            'Make the same calls with the same arguments on all ranks.']))
