"""Shards that pyarrow reads: Parquet, Arrow, and files of Hugging Face ``datasets``."""
from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence

import numpy as np

from chainermn._types import Object


class ParquetShard:
    """A Parquet file. A row group is kept in memory once one of its samples has been read.

    Args:
        path: The file.
    """

    def __init__(self, path: str) -> None:
        import pyarrow.parquet

        self._file = pyarrow.parquet.ParquetFile(path)
        _check_names(self._file.schema_arrow.names)
        metadata = self._file.metadata
        self._starts = np.cumsum([0, *(
            metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))])
        self._groups: dict[int, Object] = {}  # pyarrow tables

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, indexes: np.ndarray) -> Sequence[Object]:
        """Return samples: dicts by column, with NumPy scalars, or arrays for lists."""
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
        _check_names(self._table.column_names)

    def __len__(self) -> int:
        return self._table.num_rows

    def read(self, indexes: np.ndarray) -> Sequence[Object]:
        """Return samples: dicts by column, with NumPy scalars, or arrays for lists."""
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
        # The folder tests/datasets also has this name.
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
    """Open an Arrow file, with its features if ``datasets`` wrote the file and is installed.

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
    """Return the Arrow files in a folder that ``Dataset.save_to_disk`` wrote.

    Args:
        folder: The folder.

    Raises:
        OSError: If it is not such a folder.
    """
    path = os.path.join(folder, 'state.json')
    if not os.path.exists(path):
        raise FileNotFoundError(
            f'{folder!r} is not a Hugging Face dataset: it contains no state.json. Pass a pattern '
            f"for its files, such as '{folder}/*.npz'.")
    with open(path, encoding='utf-8') as file:
        state = json.load(file)
    return [os.path.join(folder, each['filename']) for each in state['_data_files']]


def _check_names(names: Sequence[str]) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f'several columns are named {", ".join(twice)}, but each sample is a dict '
                         'by column name. Rename the columns.')


def _rows(table: Object, indexes: np.ndarray) -> list[dict[str, Object]]:
    columns = [_values(_take(column, indexes)) for column in table.columns]
    return [dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


def _take(column: Object, indexes: np.ndarray) -> Object:
    """Return some rows of a column as one pyarrow array."""
    import pyarrow

    try:
        rows = column.take(indexes)
    except pyarrow.ArrowNotImplementedError:  # raised for views and run-end encoded columns
        return pyarrow.concat_arrays(
            [chunk for i in indexes.tolist() for chunk in column.slice(i, 1).chunks])
    return rows.chunk(0) if rows.num_chunks == 1 else rows.combine_chunks()


def _values(array: Object) -> list[Object]:
    """Return the rows of a pyarrow array.

    The type of a row depends only on the schema, not on other rows. A null becomes ``None``,
    whereas pyarrow's conversion to NumPy changes integers to floats if there is a null.
    """
    from pyarrow import types

    array = _decoded(array)
    kind = array.type
    if _is_number(kind):
        values = [*_numbers(array)]
    elif types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or (
            types.is_large_binary(kind)):
        return [*array.to_numpy(zero_copy_only=False)]  # faster than to_pylist
    elif _is_list(kind):
        values = _lists(array)
    elif types.is_struct(kind) and len({field.name for field in kind}) == kind.num_fields > 0:
        names = [field.name for field in kind]
        columns = [_values(column) for column in array.flatten()]
        values = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    else:
        return array.to_pylist()
    for i in np.flatnonzero(_nulls(array)):
        values[i] = None
    return values


def _decoded(array: Object) -> Object:
    """Return the values of an encoded array, or the lists in an extension type such as tensors."""
    import pyarrow

    if pyarrow.types.is_dictionary(array.type):
        return _decoded(array.dictionary.take(array.indices))
    if pyarrow.types.is_run_end_encoded(array.type):
        from pyarrow import compute

        return _decoded(compute.run_end_decode(array))
    if isinstance(array.type, pyarrow.BaseExtensionType) and _is_list(array.type.storage_type):
        return array.storage
    return array


def _is_number(kind: Object) -> bool:
    """Return whether NumPy has a dtype for a type: a number, date or time span, not a time."""
    from pyarrow import types

    return (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
            or types.is_date(kind) or types.is_timestamp(kind) or types.is_duration(kind))


def _is_list(kind: Object) -> bool:
    from pyarrow import types

    return (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
            or types.is_list_view(kind) or types.is_large_list_view(kind))


def _nulls(array: Object) -> np.ndarray:
    if not array.null_count:
        return np.zeros(len(array), bool)
    return array.is_null().to_numpy(zero_copy_only=False)


def _numbers(array: Object) -> np.ndarray:
    """Return numbers in the dtype of the schema. Nulls become arbitrary numbers."""
    import pyarrow

    if array.null_count:
        array = pyarrow.Array.from_buffers(
            array.type, len(array), [None, array.buffers()[1]], offset=array.offset)
    return array.to_numpy(zero_copy_only=False)


def _lists(array: Object) -> list[Object]:
    """Return an array for each list; an object array if it has nulls or non-numeric elements."""
    from pyarrow import compute

    lengths = compute.list_value_length(array)
    if lengths.null_count:
        lengths = lengths.fill_null(0)
    ends = np.cumsum(lengths.to_numpy()).tolist()
    parts = [*map(slice, [0, *ends], ends)]
    elements = _decoded(array.flatten())  # without the elements of null lists
    if not _is_number(elements.type):
        values = _values(elements)
        return [_objects(values[part]) for part in parts]
    numbers = _numbers(elements).copy()  # so that user code may modify them
    if not elements.null_count:
        return [*map(numbers.__getitem__, parts)]
    nulls, values = _nulls(elements), _values(elements)
    return [_objects(values[part]) if nulls[part].any() else numbers[part] for part in parts]


def _objects(values: Sequence[Object]) -> np.ndarray:
    array = np.empty(len(values), object)
    for i, value in enumerate(values):
        array[i] = value
    return array
