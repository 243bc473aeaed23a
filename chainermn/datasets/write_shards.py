"""Writes a dataset to files for :class:`chainermn.iterators.ShardedIterator`."""
from __future__ import annotations

import glob
import itertools
import os
import re
import sys
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import BinaryIO, cast

import chainer
import numpy as np

from chainermn._operations.arguments import is_integer
from chainermn._operations.call_signature import Caller
from chainermn._operations.on_all_ranks import check_equal, raise_together
from chainermn._process.atomic_file import open_atomic
from chainermn._process.program_place import program_place
from chainermn._types import Dataset, Object
from chainermn.communicators._recognize import as_communicator
from chainermn.communicators.communicator_base import CommunicatorBase

_NAME = 'write_shards'
_CALLER = Caller(_NAME, if_missing=(
    'With comm, every rank must call write_shards, even without samples (pass []). To write on one '
    'rank only, omit comm and call comm.barrier() on all ranks afterwards.'))


def write_shards(dataset: Dataset | Iterable[Object], prefix: str | os.PathLike[str],
                 samples_per_shard: int, comm: CommunicatorBase | None = None, *,
                 overwrite: bool = False) -> list[str]:
    """Write a dataset or a stream of samples as shards, with an index of their lengths.

    Samples that are tuples or lists of arrays or numbers are written to ``PREFIX-00000.npz``,
    ``PREFIX-00001.npz`` and so on, dicts to .npz files with names, and single arrays or numbers to
    .npy files. Samples are read back as tuples, dicts, arrays and NumPy scalars; a list in a tuple
    or dict becomes an array. All samples must have the same shapes and dtypes. For samples that
    differ, write tar or Parquet files with other tools. Only the samples of one shard are in memory
    at a time. Each sample is copied immediately, so a generator may reuse its arrays.

    With a communicator, the function is collective (every rank calls it). Each rank writes its own
    samples, and the shards of lower ranks have lower numbers (unless a length is unknown). If a
    rank fails, all ranks raise the same error.

    Each file is written atomically. The index, ``PREFIX.index.json``, is written last; with it,
    iterators need not open all shards to find their lengths.

    Args:
        dataset: Any object with a length and ``[index]``, or an iterable without a length, such as
            a generator. With ``comm``, only the samples that this rank writes.
        prefix: Beginning of the paths; the folder must exist.
        samples_per_shard: Number of samples per file; the last file of each rank may have fewer.
            Shards of 10 to 100 MB are fast to read.
        comm: ChainerMN communicator, to write from several ranks.
        overwrite: Whether to replace existing shards with this prefix, and remove any others.

    Returns:
        The paths of all shards. With ``comm``, every rank gets the paths of all ranks.

    Raises:
        FileExistsError: If shards with this prefix exist and ``overwrite`` is false.
        ValueError, TypeError: If a sample differs from the first one in shape, dtype or structure;
            if an .npy file cannot store a sample without changing it (such as text that ends with
            NUL); or if ``samples_per_shard`` is not a positive integer.
        FileNotFoundError: If the folder does not exist.
        OSError: If a file cannot be written.

    Warns:
        RuntimeWarning: On rank 0, if all ranks wrote the same samples.

    Example:
        >>> data = [(np.full(4, i, 'f'), np.int32(i % 2)) for i in range(10)]
        >>> mine = data[comm.rank::comm.size]
        >>> chainermn.datasets.write_shards(mine, 'digits', samples_per_shard=3, comm=comm)
        ['digits-00000.npz', 'digits-00001.npz', 'digits-00002.npz', 'digits-00003.npz']
    """
    comm = cast(CommunicatorBase, _OneProcess()) if comm is None else as_communicator(
        comm, f'{_NAME}(dataset, prefix, samples_per_shard, comm)')
    with comm.called_by(_CALLER):
        return _write(dataset, prefix, samples_per_shard, comm, overwrite)


class _OneProcess:
    """Takes the place of a communicator if none was passed."""

    rank = 0

    @property
    def _chainermn_channel(self) -> _OneProcess:
        return self

    def share_error(self, operation: str, error: Exception | None) -> None:
        if error is not None:
            raise error

    def allgather_obj(self, obj: Object) -> list[Object]:
        return [obj]

    def barrier(self) -> None:
        pass

    def called_by(self, caller: Caller) -> AbstractContextManager[object]:
        return nullcontext()


def _write(dataset: Dataset | Iterable[Object], path: str | os.PathLike[str],
           samples_per_shard: int, comm: CommunicatorBase, overwrite: bool) -> list[str]:
    # Imported here, because most scripts write no shards.
    from chainermn._shards.listing import remove_index, write_index

    is_root = comm.rank == 0
    with raise_together(comm, _NAME):
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f'{_NAME}(dataset, prefix): prefix must be a path, not '
                            f'{type(path).__name__}. Check the order of the arguments.')
        prefix = os.fspath(path)
        if not is_integer(samples_per_shard) or samples_per_shard < 1:
            raise ValueError('samples_per_shard must be a positive integer, not '
                             f'{samples_per_shard!r}')
        samples, n_samples = _samples(dataset)
        folder = os.path.dirname(prefix)
        if (is_root or n_samples != 0) and folder and not os.path.exists(folder):
            raise FileNotFoundError(f'the folder {folder} does not exist. Create it before you '
                                    f'call {_NAME}, or pass a different prefix.')
        existing = _existing(prefix) if is_root else []
        if existing and not overwrite:
            raise FileExistsError(f'{existing[0]} already exists. Remove the shards {prefix}-*, '
                                  'use a different prefix, or pass overwrite=True.' + _hint(comm))
        if is_root:
            remove_index(prefix)
    by_rank = comm.allgather_obj(None if n_samples is None else -(-n_samples // samples_per_shard))
    numbers, width = _numbers(by_rank, comm.rank)
    form = _Form()
    mine = []
    with raise_together(comm, _NAME):
        while columns := form.columns(itertools.islice(samples, samples_per_shard)):
            mine.append(_save(f'{prefix}-{next(numbers):0{width}}', columns))
    of_ranks = comm.allgather_obj((mine, form.text, form.digest))
    known = next((text for _, text, _ in of_ranks if text), '')
    check_equal(comm, [text or known for _, text, _ in of_ranks],
                f'{_NAME}: the samples differ between ranks',
                'Convert them to the same structure, shapes and dtypes.')
    written = [each for shards, *_ in of_ranks for each in shards]
    with raise_together(comm, _NAME):
        if is_root:
            for path in {*existing} - {path for path, *_ in written}:
                os.remove(path)
            with _naming_path(f'{prefix}.index.json'):
                write_index(prefix, written)
    comm.barrier()  # now every rank may read them
    if is_root and mine:
        _warn_of_duplicates(sum(n for _, n, _ in mine), [digest for *_, digest in of_ranks])
    return [path for path, *_ in written]


def _warn_of_duplicates(n_samples: int, digests: Sequence[int]) -> None:
    """Warn if all ranks wrote the same samples; called on rank 0."""
    if len(digests) > 1 and len(set(digests)) == 1:
        warnings.warn_explicit(
            f'{_NAME}: all {len(digests)} ranks wrote the same {n_samples} samples, so the shards '
            f'contain each sample {len(digests)} times. Pass a different part on each rank, for '
            f'example dataset[comm.rank::comm.size], or call {_NAME} without comm on rank 0 only.',
            RuntimeWarning, *program_place())


def _hint(comm: CommunicatorBase) -> str:
    mpi = sys.modules.get('mpi4py.MPI')
    if not isinstance(comm, _OneProcess) or mpi is None or not mpi.Is_initialized() or (
            mpi.COMM_WORLD.size == 1):
        return ''
    return (' If several ranks call write_shards at the same time, pass comm=comm and the samples '
            'of each rank, or call it on rank 0 only.')


def _samples(dataset: Dataset | Iterable[Object]) -> tuple[Iterator[Object], int | None]:
    """Return the samples and their number, or ``None`` if the number is unknown."""
    if not isinstance(dataset, Iterable) and not hasattr(dataset, '__getitem__'):
        raise TypeError(f'{_NAME}(dataset, prefix): dataset must be a Chainer dataset or an '
                        f'iterable of samples, not {type(dataset).__name__}. On a rank without '
                        'samples, pass [].')
    if isinstance(dataset, Sized):
        return (dataset[i] for i in range(len(dataset))), len(dataset)
    return iter(dataset), None


def _numbers(by_rank: Sequence[int | None], rank: int) -> tuple[Iterator[int], int]:
    """Return the numbers of a rank's shards, and how many digits a number has.

    If the length of any dataset is unknown, the ranks use the numbers in turn.
    """
    known = [n for n in by_rank if n is not None]
    if len(known) < len(by_rank):
        return itertools.count(rank, len(by_rank)), 5
    return itertools.count(sum(known[:rank])), max(5, len(str(sum(known) - 1)))


def _existing(prefix: str) -> list[str]:
    return sorted(path for path in glob.glob(f'{glob.escape(prefix)}-*.np[yz]')
                  if path[len(prefix) + 1:-4].isdecimal())


class _Form:
    """The structure, shapes and dtypes that all samples must have."""

    def __init__(self) -> None:
        self.text = ''  # description of the first sample
        self.digest = 0  # CRC of all samples
        self._count = itertools.count()

    def columns(self, samples: Iterable[Object]) -> dict[str, np.ndarray]:
        """Return samples as arrays by name; the name of a single array is ''."""
        columns: dict[str, _Column] = {}
        for sample in samples:
            i = next(self._count)
            arrays = {name: _as_array(value, i) for name, value in _entries(sample).items()}
            text = ', '.join(f'{name} {value.dtype}{list(value.shape)}'.lstrip()
                             for name, value in arrays.items())
            self.text = self.text or text
            if text != self.text:
                raise ValueError(f'sample {i} is {text}, but the first one is {self.text}. All '
                                 'samples must have the same shapes and dtypes. For samples that '
                                 'differ, write tar or Parquet files instead.')
            if not arrays:
                raise ValueError(f'sample {i} is empty')
            columns = columns or {name: _Column(value) for name, value in arrays.items()}
            for name, value in arrays.items():
                columns[name].append(value)
        result = {name: column.array() for name, column in columns.items()}
        for array in result.values():
            self.digest = zlib.crc32(array.reshape(-1).view(np.uint8).data, self.digest)
        return result


class _Column:
    """Copies of arrays of one shape and dtype, because user code may change the originals."""

    def __init__(self, first: np.ndarray) -> None:
        _check_dtype(first.dtype)
        self._dtype, self._shape = first.dtype, first.shape
        self._data, self._count = bytearray(), 0

    def append(self, array: np.ndarray) -> None:
        self._data += array.tobytes()
        self._count += 1

    def array(self) -> np.ndarray:
        return np.ndarray((self._count, *self._shape), self._dtype, self._data)


def _entries(sample: Object) -> Mapping[str, Object]:
    if isinstance(sample, Mapping):
        if any(not isinstance(name, str) or re.fullmatch(r'(arr_\d+)?|.*\0.*', name, re.DOTALL)
               for name in sample):
            raise TypeError('keys of samples must be nonempty strings without NUL, other than '
                            f'arr_0, arr_1 and so on, not {[*sample]}')
        return sample
    if isinstance(sample, (tuple, list)):
        return {f'arr_{i}': value for i, value in enumerate(sample)}
    return {'': sample}


def _as_array(value: Object, i: int) -> np.ndarray:
    array = np.asarray(chainer.backends.cuda.to_cpu(value) if hasattr(value, 'get') else value)
    if array.dtype.hasobject:
        raise TypeError(
            f'sample {i} contains None, which shards cannot store. Replace it, for example with '
            '-1 for a missing label.' if value is None else
            f'sample {i} contains a value of type {type(value).__name__}, but shards can only '
            'store arrays. Convert it to an array of numbers or text.')
    if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
        _check_conversion(value, array, i)
    return array


def _check_conversion(value: Object, array: np.ndarray, i: int) -> None:
    """Check that NumPy did not change values when it converted them to an array."""
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f'sample {i} contains a masked array, whose mask shards cannot store. '
                        'Convert it with x.filled(), or store x.data and x.mask.')
    if isinstance(value, np.ndarray) and value.dtype != array.dtype:
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        for part, converted in zip(value, array, strict=True):
            _check_conversion(part, converted, i)
    elif isinstance(value, (str, bytes, int, float, np.number)) and (
            array.dtype.kind not in 'mM' and array.item() != value and value == value):  # not NaN
        raise ValueError(f'sample {i}: NumPy would store {value!r} as {array.item()!r}. Encode '
                         'text with np.frombuffer(data, np.uint8); convert numbers to a single '
                         'dtype.')


def _check_dtype(dtype: np.dtype) -> None:
    """Check that an .npy file preserves a dtype; it has no names for dtypes of other packages."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # unsupported dtypes are errors below
        try:
            read = np.lib.format.descr_to_dtype(np.lib.format.dtype_to_descr(dtype))
        except ValueError:
            read = None
    if read != dtype:
        raise TypeError(f'an .npy file does not preserve the dtype {dtype}. Convert the arrays, '
                        'for example to float32, or with view(np.uint8).')


def _save(stem: str, columns: Mapping[str, np.ndarray]) -> tuple[str, int, int]:
    """Write a shard; return its path, its number of samples and its size in bytes."""
    path = f'{stem}.npy' if '' in columns else f'{stem}.npz'
    with _naming_path(path), open_atomic(path) as file:
        if '' in columns:
            # Hide that `file` is a real file: NumPy's errors about real files give no reason.
            writer = cast(BinaryIO, SimpleNamespace(write=file.write))
            np.lib.format.write_array(writer, columns[''], allow_pickle=False)
        else:
            with zipfile.ZipFile(file, 'w') as archive:
                for name, array in columns.items():
                    with archive.open(f'{name}.npy', 'w', force_zip64=True) as member:
                        np.lib.format.write_array(member, array, allow_pickle=False)
    return path, len(next(iter(columns.values()))), os.path.getsize(path)


@contextmanager
def _naming_path(path: str) -> Iterator[None]:
    """Replace an OSError of the block with one that gives the path and the reason."""
    try:
        yield
    except OSError as error:
        named = type(error)(f'cannot write {path}: {error.strerror or error}')
        named.errno = error.errno
        raise named from None
