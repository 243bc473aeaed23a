"""The store of one process: ``local``, ``device`` and ``nccl``."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import chainer

from chainermn.kvstore._kvstore import KVStore
from chainermn.kvstore._layout import Layout
from chainermn.kvstore._server import total
from chainermn.kvstore.row_sparse import RowSparse


class LocalKVStore(KVStore):
    """A store that this process shares with no other.

    Args:
        type: Name of the type.
        on_device: Whether values are summed and stored on their devices.
    """

    def __init__(self, type: str, on_device: bool) -> None:
        super().__init__(type, 0, 1, float('inf'))
        self._on_device = on_device

    def barrier(self) -> None:
        pass

    def _init(self, layouts: Sequence[Layout], values: Sequence[Any]) -> None:
        self._server.init(layouts, dict(zip(
            [layout.number for layout in layouts], values, strict=True)))

    def _push(self, layouts: Sequence[Layout], values: Sequence[Any]) -> None:
        for layout, x in zip(layouts, values, strict=True):
            self._server.update(layout.number, [x.todense() if isinstance(x, RowSparse) else x])

    def _pull(self, layouts: Sequence[Layout], row_ids: Sequence[Sequence[Any]]
              ) -> list[list[Any]]:
        return [[self._server.copy(layout.number, ids) for ids in its_ids]
                for layout, its_ids in zip(layouts, row_ids, strict=True)]

    def _merged(self, layout: Layout, values: Sequence[Any]) -> Any:
        if self._compressor is None or len(values) < 2 or layout.dtype.kind != 'f' \
                or any(isinstance(x, RowSparse) for x in values):
            return super()._merged(layout, values)
        sent = []
        for n, x in enumerate(values):
            super()._merged(layout, [x])  # checks it
            device = chainer.backend.get_device_from_array(x)
            with chainer.using_device(device):
                wire = self._compressor.compress(x.reshape(-1), (layout.key, n))
            to = chainer.backend.get_device_from_array(values[0]) if self._on_device \
                else chainer.get_device('@numpy')
            with chainer.using_device(to):
                sent.append(self._compressor.decompress(
                    to.send(wire), x.size, x.dtype).reshape(x.shape))
        return total(sent)

    def _refuse(self, verb: str, error: Exception) -> NoReturn:
        raise error

    def _agree(self, verb: str, said: str) -> None:
        pass

    def _gather(self, obj: Any) -> list[Any] | None:
        return [obj]

    def _from_rank_0(self, obj: Any) -> Any:
        return obj
