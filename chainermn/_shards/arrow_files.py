"""Shards of pyarrow: Parquet files, Arrow files, and those of Hugging Face ``datasets``."""
from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence

import numpy as np

from chainermn._types import Object


class ParquetShard:
    """A Parquet file.  Its row groups are in memory once a sample in them was read.

    Args:
        path: The file.
    """

    def __init__(self, path: str) -> None:
        import pyarrow.parquet

        self._file = pyarrow.parquet.ParquetFile(path)
        metadata = self._file.metadata
        self._starts = np.cumsum([0, *(
            metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))])
        self._groups: dict[int, Object] = {}  # tables of pyarrow

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, indexes: np.ndarray) -> Sequence[Object]:
        """Return samples: dicts by column, with arrays for lists of numbers."""
        numbers = np.searchsorted(self._starts, indexes, side='right') - 1
        samples: list[Object] = []
        for number in dict.fromkeys(numbers.tolist()):
            if number not in self._groups:
                self._groups[number] = self._file.read_row_group(number)
            rows = indexes[numbers == number] - self._starts[number]
            samples += _rows(self._groups[number], rows)
        return samples

    def close(self) -> None:
        """Close the file."""
        self._groups.clear()
        self._file.close()


class ArrowShard:
    """An Arrow file, in the file or the stream format.

    Args:
        path: The file.
    """

    def __init__(self, path: str) -> None:
        import pyarrow

        self._file = pyarrow.memory_map(path)
        try:
            self._table = pyarrow.ipc.open_file(self._file).read_all()
        except pyarrow.ArrowInvalid:
            self._file.seek(0)
            self._table = pyarrow.ipc.open_stream(self._file).read_all()

    def __len__(self) -> int:
        return self._table.num_rows

    def read(self, indexes: np.ndarray) -> Sequence[Object]:
        """Return samples: dicts by column, with arrays for lists of numbers."""
        return _rows(self._table, indexes)

    def close(self) -> None:
        """Close the file."""
        del self._table
        self._file.close()


class HuggingFaceShard:
    """An Arrow file that ``Dataset.save_to_disk`` wrote, with features such as images.

    Args:
        path: The file.
    """

    def __init__(self, path: str) -> None:
        # The folder tests/datasets has this name, too.
        from datasets import Dataset  # type: ignore[attr-defined, unused-ignore]

        self._dataset = Dataset.from_file(path).with_format('numpy')

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, indexes: np.ndarray) -> Sequence[Object]:
        """Return samples: dicts by column, with arrays."""
        return self._dataset.__getitems__(indexes.tolist())

    def close(self) -> None:
        """Release the file."""
        del self._dataset


def open_arrow(path: str) -> ArrowShard | HuggingFaceShard:
    """Open an Arrow file, with its features if ``datasets`` wrote it and is installed.

    Args:
        path: The file.
    """
    shard = ArrowShard(path)
    if b'huggingface' in (shard._table.schema.metadata or {}):
        with contextlib.suppress(ImportError):
            features = HuggingFaceShard(path)
            shard.close()
            return features
    return shard


def saved_files(folder: str) -> list[str]:
    """Return the Arrow files of a folder that ``Dataset.save_to_disk`` wrote.

    Args:
        folder: The folder.

    Raises:
        OSError: If it is not such a folder.
    """
    path = os.path.join(folder, 'state.json')
    if not os.path.exists(path):
        raise FileNotFoundError(f'{folder!r} is a folder without state.json, so it is no Hugging '
                                f'Face data set. Pass a pattern for its files: {folder}/*.npz')
    with open(path, encoding='utf-8') as file:
        state = json.load(file)
    return [os.path.join(folder, each['filename']) for each in state['_data_files']]


def _rows(table: Object, indexes: np.ndarray) -> list[dict[str, Object]]:
    rows = table.take(indexes)
    columns = [[*column.to_numpy(zero_copy_only=False)] for column in rows.columns]
    return [dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)]
