"""Changes that ``import chainermn`` makes to Chainer's Trainer.

- ``Trainer.__init__`` raises an error with advice if a multi-node optimizer has no model, instead
  of an AttributeError of ``None``.
- ``Trainer.extend`` records where user code adds an extension, for error messages. It raises an
  error if it gets a class instead of an instance.
- ``Trainer.run`` warns if extensions of several ranks write to the same files or terminal.
- ``Trainer.run`` makes the values that its LogReports report available to ``chainermn top`` and
  metrics.
- ``Trainer.run`` prints each error once, although the Trainer and the job both print errors. The
  Trainer prints an error before it finalizes the extensions, which can take a long time or hang, so
  the report of the job omits the traceback. The Trainer does not print errors that all ranks raise,
  or that another rank of the node has printed. Errors that explain a mistake are printed with the
  frames of user code only.
"""
from __future__ import annotations

import functools
import os
import sys
import traceback

from chainer.training import Extension, Trainer

from chainermn._operations import common_error
from chainermn._process import launcher
from chainermn._process.program_place import program_place
from chainermn._timeline import reported
from chainermn._types import Object
from chainermn.extensions._shared_outputs import warn_about_shared_outputs
from chainermn.optimizers import MultiNodeOptimizer


def change_trainer() -> None:
    """Make all changes."""
    init, extend, run = Trainer.__init__, Trainer.extend, Trainer.run

    @functools.wraps(init)
    def checked_init(self: Trainer, updater: Object, *args: Extension, **kwargs: Extension) -> None:
        for optimizer in updater.get_all_optimizers().values():
            if isinstance(optimizer, MultiNodeOptimizer):
                optimizer._check_set_up()
        init(self, updater, *args, **kwargs)

    @functools.wraps(extend)
    def noted_extend(self: Trainer, extension: Extension, *args: Object, **kwargs: Object) -> None:
        if isinstance(extension, type) and issubclass(extension, Extension):
            raise TypeError('trainer.extend: extension must be an instance, not the class '
                            f'{extension.__name__}. Pass an instance: {extension.__name__}(...).')
        extend(self, extension, *args, **kwargs)
        path, line = program_place()
        entry = next(reversed(self._extensions.values()))
        entry._chainermn_added_at = f'{os.path.basename(path)}:{line}'  # call_site.py shows it

    @functools.wraps(run)
    def checked_run(self: Trainer, show_loop_exception_msg: bool = True) -> None:
        warn_about_shared_outputs(self)
        reported.follow(self)
        # The Trainer tests this argument when it has caught an error.
        run(self, show_loop_exception_msg and _ShowsError())

    Trainer.__init__, Trainer.extend, Trainer.run = checked_init, noted_extend, checked_run


class _ShowsError:
    """A condition: true if the Trainer should print the error that it has just caught."""

    def __bool__(self) -> bool:
        error = sys.exc_info()[1]
        if not isinstance(error, Exception) or common_error.is_common(error):
            return False
        text = ''.join(traceback.format_exception(error))
        if not launcher.claim(text):
            common_error.mark(error, is_printed_here=False)
            return False
        common_error.mark_shown(error)
        frames = common_error.visible_frames(error)
        if frames is None:
            return True
        sys.stderr.write(''.join([  # same format as Trainer.run
            f'Exception in main training loop: {error}\nTraceback (most recent call last):\n',
            *traceback.format_tb(frames), 'Will finalize trainer extensions and updater before '
            'reraising the exception.\n']))
        return False
