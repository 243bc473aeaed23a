"""RunRecord: the inputs and results of each update of a run, to find out why two runs differ.

``chainermn compare`` reads the records. This file needs only Chainer and NumPy, and no other
module of this package, so a script for ChainerMN 7 can import a copy of it.

Each rank writes two files into the folder:

- ``rank0.txt`` begins with a line of settings in JSON, followed by one line per update (`COLUMNS`).
  After a resume, there is another line of settings, and the lines of lost updates become invalid.
- ``rank0.details`` has one line per detailed update in JSON: digests of each parameter and of the
  outputs of each function.

A digest is the CRC of some bytes. The digests of an update cover a sample of the elements, because
a difference in a gradient or a parameter spreads to many elements within a few updates. The digests
of a detailed update cover larger samples, and all elements of the parameters before the update.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import hashlib
import itertools
import json
import os
import platform
import random
import re
import subprocess
import sys
import types
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

import chainer
import numpy as np

if TYPE_CHECKING:
    from chainermn._types import Array, Model, Object, Optimizer, Parameter

#: The columns of the line of an update. Unknown values are ``-``; hyperparameters that have not
#: changed since the last update are ``=``. ``call`` counts the updates of all optimizers of the
#: process and so gives their order.
COLUMNS = ('update', 'loss', 'batch', 'examples', 'numpy', 'python', 'torch', 'cupy', 'own',
           'mean', 'parameters', 'norm of gradients', 'norm of parameters', 'hyperparameters',
           'call')

#: The batch of an update in which the rank only shadows the others, in a join.
NO_BATCH = 'none'

#: Packages whose frames are not user code.
_SKIPPED = 'chainer', 'chainermn', 'chainer_compat', 'contextlib'
_SAMPLE = 32  # elements of each parameter, or of each example
_LARGE = 2 ** 16  # elements; details only cover a sample of larger arrays
_GRADIENTS, _PARAMETERS = 'grad', 'array'  # attributes of a parameter

#: The environment variables that can change a result.
_VARIABLES = re.compile(
    r'CHAINERMN_(CUDA_AWARE|DEBUG|OVERLAY)|CHAINER_(?!.*KEY)|PYTHONHASHSEED$|'
    r'(OMP|OPENBLAS|MKL|BLIS|NUMEXPR)_|'
    r'CUDA_VISIBLE_DEVICES$|CUBLAS_|CUDNN_|NVIDIA_TF32_OVERRIDE$|NCCL_(ALGO|PROTO|NTHREADS)$|'
    r'TORCH_|CUPY_')

_LIBRARIES = ('numpy', 'scipy', 'chainer', 'chainermn', 'mpi4py', 'torch', 'cupy')


class RunRecord(chainer.training.Extension):
    """Records the inputs and results of each update, for ``chainermn compare``.

    Add it on all ranks. Each rank writes its own record, without communication. If a rank
    cannot write its record, for example because the disk is full, it prints a warning and training
    continues.

    Args:
        folder: The folder for the record, relative to the folder of the Trainer's results. If it
            already has a record, a resumed run continues that record; any other run replaces it.
        details: The number of updates from one detailed update to the next. A detailed update has
            digests of each parameter and of the outputs of each function, which show where a
            difference begins.

    Raises:
        TypeError: If ``folder`` is not a path, or ``details`` is not an integer.
        ValueError: If ``details`` is less than 1.

    Example:
        >>> trainer.extend(chainermn.extensions.RunRecord('record'))
        >>> trainer.run()
        >>> import os
        >>> os.path.exists(os.path.join(trainer.out, 'record', f'rank{comm.rank}.txt'))
        True
    """

    name = 'RunRecord'

    def __init__(self, folder: str = 'record', details: int = 100) -> None:
        if not isinstance(folder, (str, os.PathLike)):
            raise TypeError(
                f'folder must be a path, not {type(folder).__name__}. RunRecord gets the '
                'optimizers from the Trainer. Without a Trainer, set CHAINERMN_RECORD.')
        check_details(details)
        self.folder, self.details = folder, details
        self._records: list[Recording] = []

    def trigger(self, trainer: chainer.training.Trainer) -> bool:
        """Return False, because updates are recorded when they happen."""
        return False

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        """Do nothing."""

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        """Start recording all optimizers."""
        folder = os.path.join(trainer.out, self.folder)
        optimizers = trainer.updater.get_all_optimizers()
        for name in sorted(optimizers):
            self._records.append(record(
                optimizers[name], folder, self.details, '' if len(optimizers) == 1 else name,
                lambda: trainer.updater.iteration + 1))

    def finalize(self) -> None:
        """Close the files."""
        for each in self._records:
            each.close()


def check_details(details: object) -> None:
    """Check the number of updates from one detailed update to the next.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If it is less than 1.
    """
    if not isinstance(details, int):
        raise TypeError('details must be a positive integer (the number of updates from one '
                        f'detailed update to the next), not {details!r}')
    if details < 1:
        raise ValueError('details must be a positive integer (the number of updates from one '
                         f'detailed update to the next), not {details}')


def record(optimizer: Optimizer, folder: str, details: int = 100, name: str = '',
           number: Callable[[], int] | None = None) -> Recording:
    """Record the updates of an optimizer.

    Args:
        optimizer: The optimizer, or a multi-node optimizer, whether or not it has been set up with
            a model.
        folder: The folder for the record.
        details: Same as for :class:`RunRecord`.
        name: The name of the optimizer if there are several. File names begin with it.
        number: Function that returns the number of the next update; by default, the optimizer's
            count is used.

    Returns:
        The recording. Its method ``close`` ends it.
    """
    recording = Recording(folder, details, name, number)
    if hasattr(type(optimizer), '_recording'):  # a multi-node optimizer of this package
        if optimizer._recording is not None:
            before = optimizer._recording.folder
            _warn(f'this optimizer was already being recorded to {before}' + (
                '' if before == folder else f'; from now on it is recorded to {folder}')
                + '. Use either CHAINERMN_RECORD or a single RunRecord.')
        optimizer._recording = recording
        return recording
    actual = getattr(optimizer, 'actual_optimizer', optimizer)
    update, update_actual = optimizer.update, actual.update

    def recorded(self: Optimizer, lossfun: Any = None, *args: Object, **kwds: Object) -> None:
        lossfun = recording.begin(optimizer, lossfun, args, kwds)
        if actual is not optimizer:
            recording.record_copy()  # replaced if the update takes a step
        update(lossfun, *args, **kwds)
        if actual is optimizer:
            recording.record_means(optimizer)  # after the hooks, which may have changed them
        recording.end(optimizer)

    def recorded_actual(self: Optimizer, lossfun: Any = None, *args: Object, **kwds: Object
                        ) -> None:
        recording.record_means(optimizer)
        update_actual(lossfun, *args, **kwds)

    if actual is not optimizer:
        actual.update = types.MethodType(recorded_actual, actual)
    object.__setattr__(optimizer, 'update', types.MethodType(recorded, optimizer))
    return recording


def record_by_environment(optimizer: Optimizer, folder: str, details: str) -> None:
    """Record a new optimizer of this process. From the second one on, file names have a prefix.

    Args:
        optimizer: The optimizer.
        folder: The value of ``CHAINERMN_RECORD``.
        details: The value of ``CHAINERMN_RECORD_DETAILS``.

    Raises:
        ValueError: If ``details`` is not a positive integer.
    """
    if details and not (details.isdecimal() and int(details)):
        raise ValueError('CHAINERMN_RECORD_DETAILS must be a positive integer (a number of '
                         f'updates), not {details!r}')
    number = next(_numbers)
    record(optimizer, folder, int(details or 100), '' if number == 1 else f'optimizer{number}')


#: Numbers the optimizers that ``CHAINERMN_RECORD`` records in this process.
_numbers = itertools.count(1)


class _CallCount:
    """Counts the updates of all optimizers of this process, and of the runs that it resumes."""

    last = 0


class Recording:
    """Writes the record of an optimizer on this rank.

    Args:
        folder: Same as for :func:`record`.
        details: Same as for :func:`record`.
        name: Same as for :func:`record`.
        number: Same as for :func:`record`.
    """

    def __init__(self, folder: str, details: int, name: str = '',
                 number: Callable[[], int] | None = None) -> None:
        self.folder, self._every, self._name = folder, details, name
        self._number_of = number
        self._file: int | None = None
        self._details_file: int | None = None
        self._process = os.getpid()
        self._line: dict[str, str] = {}
        self._params: Sequence[Parameter] = ()  # in the current update
        self._hyperparameters = ''  # in the last line
        self._details: dict[str, Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of the optimizer is not recorded

    def close(self) -> None:
        """Close the files; later updates are not recorded."""
        for file in (self._file, self._details_file):
            if file is not None:
                os.close(file)
        self._file = self._details_file = None
        self._line, self._every = {}, 0  # an update may have failed halfway

    def begin(self, optimizer: Optimizer, lossfun: Any, args: tuple[Object, ...],
              kwds: dict[str, Object]) -> Any:
        """Begin an update.

        Args:
            optimizer: The optimizer.
            lossfun: The loss function, or ``None``.
            args: The arguments of the loss function: the batch.
            kwds: The keyword arguments of the loss function.

        Returns:
            A loss function that also records the loss.
        """
        if not self._every or self._process != os.getpid():  # a forked child has no record
            return lossfun
        number = self._next(optimizer)
        if self._file is None:
            with self._warn_and_close():
                self._open(optimizer, number)
            if self._file is None:
                return lossfun
        is_detailed = (number - 1) % self._every == 0
        self._line = dict.fromkeys(COLUMNS, '-')
        _CallCount.last += 1
        self._line['update'], self._line['call'] = str(number), str(_CallCount.last)
        if args or kwds:
            self._line['batch'], self._line['examples'] = _digests_of_batch(
                [*args, *(kwds[key] for key in sorted(kwds))])
        self._line.update(random_states())
        self._details = None
        if is_detailed:
            self._details = {'update': number, 'before': _details_of(
                optimizer.target, _PARAMETERS, is_complete=True)}
        if lossfun is None or not callable(lossfun):
            return lossfun

        def recorded(*args: Object, **kwds: Object) -> Any:
            if self._details is None:
                loss = lossfun(*args, **kwds)
            else:
                with _RecordFunctions(optimizer.target) as functions:
                    loss = lossfun(*args, **kwds)
                self._details['functions'] = functions.outputs
            if isinstance(getattr(loss, 'array', None), chainer.get_array_types()):
                self.record_loss(loss.array)
            return loss

        return recorded

    def begin_without_batch(self, optimizer: Optimizer, params: Sequence[Parameter]) -> None:
        """Begin an update of the other ranks, if this rank has exhausted its inputs.

        Args:
            optimizer: The optimizer.
            params: The parameters of the optimizer.
        """
        self.begin(optimizer, None, (), {})
        if self._line:
            self._params = params
            self._line['batch'] = NO_BATCH

    def record_loss(self, loss: Array) -> None:
        """Record the loss of this rank, an array of one element."""
        if self._line and loss.size == 1:
            self._line['loss'] = str(chainer.backends.cuda.to_cpu(loss).reshape(())[()])

    def record_gradients(self, optimizer: Optimizer, params: Sequence[Parameter], are_sent: bool
                         ) -> None:
        """Record the gradients of this rank if there are other ranks.

        Args:
            optimizer: The optimizer.
            params: The parameters of the optimizer.
            are_sent: Whether some of the gradients are already being averaged.
        """
        self._params = params
        if self._line and optimizer.communicator.size > 1 and not are_sent:
            self._line['own'] = _sampled(params, _GRADIENTS)[0]
            if self._details is not None:
                self._details['own'] = _details_of(optimizer.target, _GRADIENTS)

    def record_means(self, optimizer: Optimizer, are_complete: bool = True) -> None:
        """Record the hyperparameters and the mean gradients.

        Args:
            optimizer: The optimizer.
            are_complete: Whether this rank has the means of all parameters, not only of its shard.
        """
        if not self._line:
            return
        self._line['hyperparameters'] = json.dumps(
            _hyperparameters(optimizer), separators=(',', ':')).replace(' ', '_')
        if are_complete:
            self._line['mean'], self._line['norm of gradients'] = _sampled(
                self._params_of(optimizer), _GRADIENTS)
            if self._details is not None:
                self._details['mean'] = _details_of(optimizer.target, _GRADIENTS)

    def record_copy(self) -> None:
        """Record that the update copies the parameters of rank 0 instead of taking a step."""
        if self._line:
            self._line['mean'] = 'copied'

    def end(self, optimizer: Optimizer) -> None:
        """End an update and write its line."""
        if not self._line:
            return
        line, self._line = self._line, {}
        line['parameters'], line['norm of parameters'] = _sampled(
            self._params_of(optimizer), _PARAMETERS)
        self._params = ()
        line['cupy'] = _cupy_seeds()
        if line['hyperparameters'] == self._hyperparameters:
            line['hyperparameters'] = '='
        elif line['hyperparameters'] != '-':
            self._hyperparameters = line['hyperparameters']
        with self._warn_and_close():
            _write(self._file, ' '.join(line.values()))
            if self._details is not None:
                self._details['after'] = _details_of(optimizer.target, _PARAMETERS)
                _write(self._details_file, json.dumps(self._details))
                self._details = None

    def _params_of(self, optimizer: Optimizer) -> Sequence[Parameter]:
        self._params = self._params or list(optimizer.target.params())
        return self._params

    def _next(self, optimizer: Optimizer) -> int:
        return self._number_of() if self._number_of else int(getattr(optimizer, 't', 0)) + 1

    def _open(self, optimizer: Optimizer, number: int) -> None:
        os.makedirs(self.folder, exist_ok=True)
        rank, size = _rank(optimizer)
        start = os.path.join(self.folder, (self._name and f'{self._name}.') + f'rank{rank}')
        self._file = _open(start + '.txt', is_new=number == 1)
        self._details_file = _open(start + '.details', is_new=number == 1)
        _CallCount.last = max(_CallCount.last, _last_call(self._file))
        _write(self._file, json.dumps({
            **settings_of(optimizer, rank, size), 'first update': number}))

    @contextlib.contextmanager
    def _warn_and_close(self) -> Iterator[None]:
        """If the record cannot be written, warn and stop recording, but let training continue."""
        try:
            yield
        except OSError as error:
            self.close()
            reason = ('it is a file, but a record needs a folder' if os.path.isfile(self.folder)
                      else error)
            _warn(f'stopped recording on this rank: cannot write to {self.folder}: {reason}. '
                  'Training continues.')


def _warn(text: str) -> None:
    """Warn at the line of user code that is being executed."""
    frame = _frame_of_program()
    if frame is None:
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    else:
        warnings.warn_explicit(text, RuntimeWarning, frame.f_code.co_filename, frame.f_lineno)


def _open(path: str, is_new: bool) -> int:
    """Open a file to append lines, and lock it.

    Raises:
        OSError: Also if another process writes to the file.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # forked processes do not inherit it
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            os.close(file)
            raise OSError(f'another job is writing {os.path.basename(path)}. Use a different '
                          'folder for each job') from None
    if is_new:
        os.truncate(file, 0)
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b'\n':  # the run was killed while writing
        _write(file, '')
    return file


def _last_call(file: int) -> int:
    """Return the call of the last line of a record; 0 if it has no updates."""
    end = os.pread(file, 2 ** 12, max(0, os.fstat(file).st_size - 2 ** 12)).split(b'\n')
    words = end[-2].split(b' ') if len(end) > 1 else []
    return int(words[-1]) if len(words) == len(COLUMNS) and words[-1].isdigit() else 0


def _write(file: int | None, line: str) -> None:
    assert file is not None
    rest = line.encode() + b'\n'
    while rest:  # on a full disk, a call writes a part, and the next call fails
        rest = rest[os.write(file, rest):]


# --- digests -------------------------------------------------------------------------------------

def _sampled(params: Sequence[Parameter], attribute: str) -> tuple[str, str]:
    """Return the digest and the norm of a sample of all parameters or gradients."""
    samples = []
    for param in params:
        array = getattr(param, attribute)
        if array is not None:
            samples.append(array.ravel()[::array.size // _SAMPLE or 1])
    if not samples:
        return '-', '-'
    if isinstance(samples[0], np.ndarray):
        sample = np.concatenate(samples)
    else:
        xp = chainer.backend.get_array_module(*samples)
        sample = chainer.backends.cuda.to_cpu(xp.concatenate(samples))
    x = sample.astype('d')
    return _short(zlib.crc32(sample.data)), f'{float(x.dot(x)) ** .5:.6e}'


def _short(number: int) -> str:
    return f'{number & 0xffffff:06x}'


def _digest(array: Array) -> list[Any]:
    """Return the digest of an array; for floats, also norm, mean and maximum norm of a sample."""
    flat = np.ascontiguousarray(chainer.backends.cuda.to_cpu(array)).reshape(-1)
    digest = zlib.crc32(flat.data, zlib.crc32(str(array.shape).encode()))
    found: list[Any] = [f'{digest:08x}']
    if array.dtype.kind == 'f' and array.size:
        x = flat[::max(1, flat.size // _LARGE)].astype('d')
        with np.errstate(all='ignore'):
            found += [float(f'{value:.7g}') for value in (
                np.sqrt(np.square(x).sum()), x.mean(), np.abs(x).max())]
    return found


def _details_of(target: Model, attribute: str, is_complete: bool = False) -> dict[str, Any]:
    result = {}
    for path, param in sorted(target.namedparams(include_uninit=False)):
        array = getattr(param, attribute)
        result[path] = None if array is None else _digest(
            array if is_complete else _sample(array))
    return result


def _digests_of_batch(values: list[Any]) -> tuple[str, str]:
    """Return the digest of a batch, and a digest that is independent of the examples' order."""
    arrays = [value.array if isinstance(value, chainer.Variable) else value for value in values]
    n = next((len(each) for each in arrays if _has_rows(each)), 0)
    rows, other = [], 0
    for each in arrays:
        if _has_rows(each) and len(each) == n and n:
            rows.append(_rows(each))
        else:
            other = zlib.crc32(_bytes(each), other)
    if not rows:
        return _short(other), _short(other)
    words = np.concatenate(rows, axis=1).view(np.uint32)
    factors = _FACTORS if words.shape[1] <= len(_FACTORS) else _factors(words.shape[1])
    of_rows = words.dot(factors[:words.shape[1]]) >> 32
    # Use squares: with plain sums, swapping the labels of two examples would go unnoticed.
    return _short(zlib.crc32(words.data, other)), _short(int(of_rows.dot(of_rows)))


def _factors(n: int) -> np.ndarray:
    return np.array([((i * 0x9E3779B97F4A7C15) & (2 ** 64 - 1)) | 1 for i in range(1, n + 1)],
                    np.uint64)


_FACTORS = _factors(256)


def _has_rows(value: Any) -> bool:
    return hasattr(value, '__len__') and getattr(value, 'ndim', 1) > 0


def _rows(values: Any) -> np.ndarray:
    """Return bytes for each row of an array (a sample) or each value of a list (a digest)."""
    n = len(values)
    if isinstance(values, chainer.get_array_types()) and values.dtype != object:
        rows = values.reshape(n, values.size // n)
        rows = np.ascontiguousarray(chainer.backends.cuda.to_cpu(
            rows[:, ::rows.shape[1] // _SAMPLE or 1])).view(np.uint8)
        missing = -rows.shape[1] % 4
        return np.concatenate([rows, rows[:, :1].repeat(missing, 1)], 1) if missing else rows
    digests = [zlib.crc32(_bytes(each)) for each in values]
    return np.array(digests, np.uint32).view(np.uint8).reshape(n, 4)


def _bytes(value: Any) -> bytes:
    if isinstance(value, (tuple, list)):
        return b','.join(map(_bytes, value))
    if isinstance(value, dict):
        return b','.join(_bytes(key) + b':' + _bytes(value[key]) for key in value)
    if isinstance(value, chainer.get_array_types()):
        value = chainer.backends.cuda.to_cpu(value)
        return value.tobytes() if value.dtype != object else b','.join(map(_bytes, value.ravel()))
    if isinstance(value, (int, float, str, bytes, np.generic)):
        return repr(value).encode()
    return type(value).__name__.encode()  # its repr may contain an address


def random_states() -> dict[str, str]:
    """Return digests of the states of the random number generators, by column."""
    _, words, gauss = random.getstate()
    found = {'numpy': zlib.crc32(_numpy_state()),
             'python': hash((words, gauss or 0.))}  # numbers have the same hash in all processes
    torch = sys.modules.get('torch')
    if torch is not None and hasattr(torch, 'get_rng_state'):
        found['torch'] = zlib.crc32(torch.get_rng_state().numpy().data)
    return {name: f'{value & 0xffff:04x}' for name, value in found.items()}


def _cupy_seeds() -> str:
    """Return a digest of the seeds of CuPy's generators in use, whose states cannot be read."""
    generators = getattr(sys.modules.get('cupy.random._generator'), '_random_states', {})
    seeds = [int(getattr(generators[device], '_rk_seed', 0)) for device in sorted(generators)]
    return f'{zlib.crc32(repr(seeds).encode()) & 0xffff:04x}' if seeds else '-'


def _numpy_state() -> bytes:
    """Return the state of the global generator; reading its memory is the fastest way."""
    generator = np.random.get_bit_generator() if hasattr(np.random, 'get_bit_generator') else None
    if isinstance(generator, np.random.MT19937):
        return ctypes.string_at(generator.ctypes.state_address, 4 * 625)  # keys and position
    return repr(np.random.get_state(legacy=False)).encode()


# --- functions -----------------------------------------------------------------------------------

class _Links(chainer.LinkHook):
    """Tracks the path of the link that is being called."""

    name = 'RunRecord'

    def __init__(self, target: Model) -> None:
        self._paths = {id(link): path for path, link in target.namedlinks()}
        self.stack = ['']

    def forward_preprocess(self, args: Any) -> None:
        self.stack.append(self._paths.get(id(args.link), ''))

    def forward_postprocess(self, args: Any) -> None:
        self.stack.pop()


class _RecordFunctions:
    """Records the outputs of each function, in the order of the forward pass."""

    def __init__(self, target: Model) -> None:
        self.outputs: list[list[Any]] = []
        self._links = _Links(target)
        self._context = contextlib.ExitStack()

    def __enter__(self) -> _RecordFunctions:
        apply = chainer.FunctionNode.apply

        def recorded(function: Any, inputs: Any) -> Any:
            outputs = apply(function, inputs)
            self.outputs.append([function.label, _place(), self._links.stack[-1],
                                 *[_digest(_sample(y.array)) for y in outputs]])
            return outputs

        self._context.enter_context(self._links)
        self._context.callback(setattr, chainer.FunctionNode, 'apply', apply)
        chainer.FunctionNode.apply = recorded
        return self

    def __exit__(self, *error: object) -> None:
        self._context.close()


def _sample(array: Array) -> Array:
    """Return a small array, or a sample of a large one."""
    return array if array.size <= _LARGE else array.ravel()[::array.size // _LARGE]


def _place() -> str:
    """Return the line of user code that is being executed, or ''."""
    frame = _frame_of_program()
    return '' if frame is None else (
        f'{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}')


def _frame_of_program() -> types.FrameType | None:
    """Return the innermost frame outside this file and the packages in ``_SKIPPED``."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_globals is globals() or frame.f_globals.get(
            '__name__', '').partition('.')[0] in _SKIPPED):
        frame = frame.f_back
    return frame


# --- settings ------------------------------------------------------------------------------------

def settings_of(optimizer: Optimizer, rank: int = 0, size: int = 1) -> dict[str, Any]:
    """Return the hardware, software and settings of a run on this rank, by name."""
    actual = getattr(optimizer, 'actual_optimizer', optimizer)
    found: dict[str, Any] = {
        'format': 1, 'columns': list(COLUMNS), 'rank': rank, 'size': size, 'host': platform.node(),
        'command': sys.argv, 'Python': platform.python_version(),
        **_versions(), **_software(), **_script(rank),
        **{name: value for name, value in sorted(os.environ.items())
           if _VARIABLES.match(name)},
        'device': str(getattr(actual.target, 'device', '')).partition(':')[0],
        'framework': 'PyTorch' if hasattr(actual, 'optimizer_name') else 'Chainer',
        'optimizer': getattr(actual, 'optimizer_name', type(actual).__name__),
        'hooks': [f'{name}: {type(hook).__name__} {_plain(vars(hook))}'
                  if hasattr(hook, '__dict__') else name for name, hook in _hooks(actual)],
        **{f'hyperparameter {name}': value for name, value in _hyperparameters(actual).items()},
        'loss scale': 'dynamic' if getattr(actual, '_loss_scaling_is_dynamic', False)
                      else _plain(getattr(actual, '_loss_scale', None)),
        **_rules(actual),
        **{f'chainer.config.{name}': _plain(getattr(chainer.config, name)) for name in (
            'autotune', 'cudnn_deterministic', 'cudnn_fast_batch_normalization', 'dtype',
            'lazy_grad_sum', 'use_cudnn', 'use_cudnn_tensor_core', 'use_ideep', 'use_torch',
            'torch_compute_dtype', 'fused_updates') if hasattr(chainer.config, name)},
    }
    communicator = getattr(optimizer, 'communicator', None)
    if communicator is not None:
        found['communicator'] = type(communicator).__name__
        found['multi-node optimizer'] = type(optimizer).__name__
        settings = getattr(optimizer, '_settings', None)
        found.update(getattr(getattr(settings, 'caller', None), '_options', {}))
        if (compression := getattr(optimizer, 'compression', None)) is not None:
            found['compression'] = type(compression).__name__
    found['model'] = {
        path: [param.shape, str(param.dtype), *_digest(param.array)[:2]]
        for path, param in sorted(actual.target.namedparams(include_uninit=False))}
    return found


def _rules(optimizer: Optimizer) -> dict[str, Any]:
    """Return the classes of update rules, frozen parameters, and per-parameter hooks."""
    params = sorted(optimizer.target.namedparams(include_uninit=False))
    rules = [(path, getattr(param, 'update_rule', None)) for path, param in params]
    return {
        'update rules': sorted({type(rule).__name__ for _, rule in rules if rule is not None}),
        'frozen parameters': [path for path, rule in rules
                              if rule is not None and not rule.enabled],
        'hooks of parameters': [f'{path}: {name}' for path, rule in rules if rule is not None
                                for name, _ in _hooks(rule)]}


def _hyperparameters(optimizer: Optimizer) -> dict[str, Any]:
    actual = getattr(optimizer, 'actual_optimizer', optimizer)
    return {name: _plain(value) for name, value in sorted(actual.hyperparam.get_dict().items())}


def _hooks(optimizer: Optimizer) -> list[tuple[str, Any]]:
    hookable = getattr(optimizer, '_hookable', optimizer)
    return [each for name in ('_pre_update_hooks', '_post_update_hooks')
            for each in (getattr(hookable, name, None) or {}).items()]


def _plain(value: object) -> Any:
    """Return a value that JSON can represent."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (np.number, np.ndarray)):
        return value.tolist()
    if isinstance(value, np.dtype) or value is chainer.mixed16:
        return 'mixed16' if value is chainer.mixed16 else str(value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else (
        getattr(value, '__name__', type(value).__name__))


def _rank(optimizer: Optimizer) -> tuple[int, int]:
    communicator = getattr(optimizer, 'communicator', None)
    if communicator is None and 'mpi4py.MPI' in sys.modules:
        communicator = sys.modules['mpi4py.MPI'].COMM_WORLD
    return getattr(communicator, 'rank', 0), getattr(communicator, 'size', 1)


def _script(rank: int) -> dict[str, str]:
    """Return the script and its version."""
    path = os.path.abspath(sys.argv[0]) if sys.argv and os.path.isfile(sys.argv[0]) else ''
    if not path:
        return {}
    with open(path, 'rb') as file:
        found = {'script': path, 'digest of the script': hashlib.sha256(
            file.read()).hexdigest()[:16]}
    return {**found, **_commit(os.path.dirname(path))} if rank == 0 else found


@functools.cache
def _commit(folder: str) -> dict[str, str]:
    """Return the commit of a folder, if it is in a git repository."""
    git = ['git', '-C', folder]
    try:
        commit, changed = (subprocess.check_output(
            [*git, *arguments], stderr=subprocess.DEVNULL, timeout=5).decode().strip()
            for arguments in (['rev-parse', 'HEAD'], ['status', '--porcelain', '-uno']))
    except (OSError, subprocess.SubprocessError):
        return {}
    return {'git commit': commit, 'changed since the commit': 'yes' if changed else 'no'}


def _versions() -> dict[str, str]:
    """Return the versions of installed packages, even if they are not imported yet."""
    found = {}
    for name in _LIBRARIES:
        with contextlib.suppress(Exception):
            found[f'version of {name}'] = (
                sys.modules[name].__version__ if name in sys.modules else metadata.version(name))
    return found


def _software() -> dict[str, str]:
    """Return the hardware and the libraries below Python: MPI, BLAS, the processor, the GPU."""
    found = {'processor': _processor(), 'BLAS': _blas()}
    if 'mpi4py.MPI' in sys.modules:
        found['MPI'] = sys.modules['mpi4py.MPI'].Get_library_version().partition('\n')[0].strip(
            '\0 ')
    cupy = sys.modules.get('cupy')
    if cupy is not None:
        with contextlib.suppress(Exception):  # no GPU
            found['GPU'] = cupy.cuda.runtime.getDeviceProperties(
                cupy.cuda.Device().id)['name'].decode()
            found['CUDA'] = str(cupy.cuda.runtime.runtimeGetVersion())
            found['NCCL'] = str(cupy.cuda.nccl.get_version())
    return found


def _processor() -> str:
    with contextlib.suppress(OSError), open('/proc/cpuinfo') as file:
        match = re.search(r'^model name\s*: (.*)$', file.read(), re.M)
        if match:
            return match[1]
    return platform.processor() or platform.machine()


def _blas() -> str:
    """Return the kernels that OpenBLAS has selected for the processor, and its thread count."""
    with contextlib.suppress(OSError), open('/proc/self/maps') as file:
        paths = sorted(set(re.findall(r'\S*openblas\S*\.so\S*', file.read())))
        for path in paths:
            library = ctypes.CDLL(path)
            for prefix in ('scipy_', ''):
                for suffix in ('64_', ''):
                    with contextlib.suppress(AttributeError):
                        name = getattr(library, f'{prefix}openblas_get_corename{suffix}')
                        threads = getattr(library, f'{prefix}openblas_get_num_threads{suffix}')
                        name.restype = ctypes.c_char_p
                        return f'OpenBLAS, {name().decode()}, {threads()} threads'
    return 'unknown'
