"""Call sites: the file and line of user code that called an operation."""
from __future__ import annotations

import inspect
import linecache
import os
import sys
from collections.abc import Iterator
from types import FrameType

import chainer

from chainermn._process.program_place import PACKAGE, PACKAGES
from chainermn._types import Object

#: The module with the wrapper of all operations.
WRAPPER = PACKAGE + os.path.join('_operations', 'call.py')
#: Folders of the layers through which every operation of a communicator passes.
LAYERS = WRAPPER, *(f'{PACKAGE}{name}{os.sep}' for name in (
    'communicators', '_collectives', '_gradients', '_transport', '_consistency', '_diagnostics',
    '_timeline'))
_RUN = inspect.unwrap(chainer.training.Trainer.run).__code__
#: The lines of Trainer.run that call the extension in the variable ``entry``.
_CALLS_OF_EXTENSIONS = frozenset({
    'entry.extension(self)', 'if entry.trigger(self):', 'initializer(self)', 'finalize()'})
#: The prefix of the part of a call site that describes an extension.
IN_EXTENSION = ', in the extension '
_FUNCTIONS = f'{PACKAGE}functions{os.sep}'


def _function(frame: FrameType) -> str:
    """Describe the ``chainermn.functions`` function of a frame; return '' for other frames."""
    node, method = frame.f_locals.get('self'), frame.f_code.co_name
    if not isinstance(node, chainer.FunctionNode) or method not in ('forward', 'backward'):
        return ''
    name = type(node).__name__
    name = 'reduce_scatter' if name == 'ReduceScatter' else name.lower()
    return (f', in backward of chainermn.functions.{name}' if method == 'backward' else
            f', in chainermn.functions.{name}')


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def describe() -> str:
    """Describe the call site of the current operation, as the end of a sentence.

    For example ``, called at train.py:8``, or ``, in backward of chainermn.functions.allgather,
    called at train.py:8``. Frames of this package and of Chainer are skipped. If a Trainer
    extension called the operation, this is the line that added the extension, not the line of
    ``trainer.run()``.
    """
    frame, through, extension = sys._getframe(1), '', _extension()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGES):
        if frame.f_code is _RUN and extension:
            return through + extension
        if frame.f_code.co_filename.startswith(_FUNCTIONS):
            through = _function(frame) or through
        frame = frame.f_back
    if frame.f_code.co_filename.startswith(PACKAGES):
        return through  # at the end of the script, or in a thread of this package
    return (f'{through}, called at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}'
            f'{extension}')


def iteration() -> int | None:
    """Return the iteration, from 1, of the Trainer that calls the current operation, if any."""
    names: list[str] = []  # names of inner functions
    for frame in outwards(sys._getframe(1)):
        # Do not read the variables of other frames: Python would keep them alive until the
        # function returns.
        if frame.f_code is _RUN:
            is_in_update = names[-1:] == ['update'] or 'update_core' in names
            return frame.f_locals['self'].updater.iteration + is_in_update
        names.append(frame.f_code.co_name)
    return None


def _extension() -> str:
    """Describe the extension of the Trainer that calls the current operation, or return ''."""
    frame = next((each for each in outwards(sys._getframe(1)) if each.f_code is _RUN), None)
    if frame is None or linecache.getline(
            frame.f_code.co_filename, frame.f_lineno).strip() not in _CALLS_OF_EXTENSIONS:
        return ''
    entry = frame.f_locals['entry']
    name = getattr(entry.extension, 'name', None) or type(entry.extension).__name__
    place = getattr(entry, '_chainermn_added_at', '')  # _trainer_changes.py
    return f'{IN_EXTENSION}{name!r}' + (f' added at {place}' if place else '') + (
        f' with trigger={_trigger(entry.trigger)}')


def _trigger(trigger: Object) -> str:
    """Describe the trigger of an extension in the way user code passes it."""
    if type(trigger) is chainer.training.triggers.IntervalTrigger:
        return f'({trigger.period:g}, {trigger.unit!r})'
    return getattr(trigger, '__name__', type(trigger).__name__)


def locate() -> str:
    """Return the call site of the current operation, such as ``train.py:8``."""
    frame = sys._getframe(1)  # not outwards(), which takes longer: every isend calls this
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGES):
        frame = frame.f_back
    return f'{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}'
