"""Call sites: file and line of the program's call, and what of this package passed it on."""
from __future__ import annotations

import os
import sys

import chainer

#: The folder of this package.
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
#: Folders of the layers through which every operation of a communicator passes.
LAYERS = tuple(f'{PACKAGE}{name}{os.sep}' for name in (
    'communicators', '_collectives', '_gradients', '_transport', '_consistency', '_diagnostics',
    '_tracing'))
_CHAINER = os.path.dirname(os.path.abspath(chainer.__file__)) + os.sep


def called() -> str:
    """Says it of the operation that is being called, as the end of a sentence.

    For example ``, called at train.py:8``, or ``, in evaluate() of multi_node_evaluator.py, called
    at train.py:8``, where Chainer's Trainer is passed over.
    """
    frame, through, is_ours = sys._getframe(1), '', True
    while frame.f_back is not None and frame.f_code.co_filename.startswith((PACKAGE, _CHAINER)):
        path = frame.f_code.co_filename
        is_ours = is_ours and path.startswith(PACKAGE)
        if is_ours and not path.startswith(LAYERS):
            through = f', in {frame.f_code.co_name}() of {os.path.basename(path)}'
        frame = frame.f_back
    return f'{through}, called at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}'


def site() -> str:
    """Returns file and line of the program, such as ``train.py:8``; passes over Chainer's code."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((PACKAGE, _CHAINER)):
        frame = frame.f_back
    return f'{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}'
