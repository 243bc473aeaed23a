"""Startup hook: makes ``import chainermn`` find ChainerMN 8, and patches Chainer on import.

A ``.pth`` file in site-packages imports this file and calls :func:`enable` in every Python
process of the environment, so at startup this file imports only ``os`` and ``sys``, unless one of
the following variables requires more.

Environment variables:
    CHAINERMN_OVERLAY: ``0`` leaves ``sys.path`` unchanged, so ``import chainermn`` finds the old
        package that is part of Chainer.
    CHAINER_COMPAT: ``0`` disables the patches.
    CHAINER_COMPAT_DIALECT: ``1`` to ``6`` restores results that have changed since that version of
        Chainer.
    CHAINER_COMPAT_NUMPY_ALIASES: ``1`` restores names that NumPy removed, such as ``np.float``.
    CHAINER_COMPAT_NAMES: ``all`` also restores other names and behavior that NumPy, CuPy and
        Python removed.
    CHAINERMN_RUN_FOLDER: Set by ``chainermn run``; a rank that fails early aborts the job.
"""

import os
import sys

TYPE_CHECKING = False  # as in the module typing, which this file does not import
if TYPE_CHECKING:
    from chainer_compat.pytorch.conversion.comparison import Comparison as Comparison
    from chainer_compat.pytorch.conversion.comparison import compare as compare
    from chainer_compat.pytorch.conversion.convert import to_torch as to_torch
    from chainer_compat.pytorch.conversion.errors import ConversionError as ConversionError
    from chainer_compat.pytorch.conversion.onnx_file import to_onnx as to_onnx
    from chainer_compat.pytorch.conversion.optimizers import (
        load_torch_optimizer as load_torch_optimizer,
    )
    from chainer_compat.pytorch.conversion.optimizers import (
        to_torch_optimizer as to_torch_optimizer,
    )
    from chainer_compat.pytorch.conversion.weights import load_weights as load_weights

#: Names that are imported on first use, and the modules of ``pytorch.conversion`` that have them.
CONVERSION = {
    'Comparison': 'comparison', 'ConversionError': 'errors', 'compare': 'comparison',
    'load_torch_optimizer': 'optimizers', 'load_weights': 'weights', 'to_onnx': 'onnx_file',
    'to_torch': 'convert', 'to_torch_optimizer': 'optimizers',
}

#: Values that turn a feature off. Invalid values raise an error when Chainer is imported: an error
#: raised here would only be printed, in every process.
OFF = '0', 'false', 'no', 'off'

COMPAT_VARIABLE, OVERLAY_VARIABLE = 'CHAINER_COMPAT', 'CHAINERMN_OVERLAY'
ALIASES_VARIABLE = 'CHAINER_COMPAT_NUMPY_ALIASES'
NAMES_VARIABLE = 'CHAINER_COMPAT_NAMES'
#: Set by ``chainermn run``.
RUN_VARIABLE = 'CHAINERMN_RUN_FOLDER'


def enable() -> None:
    """Make ``import chainermn`` find ChainerMN 8, and ``import chainer`` work. Idempotent."""
    if RUN_VARIABLE in os.environ:
        from chainer_compat import early_failures

        early_failures.listen(_overlay(), ChainerFinder)
    if _is_on(OVERLAY_VARIABLE):
        _insert_before_site_packages(_overlay())
    if _is_on(COMPAT_VARIABLE) and ChainerFinder not in sys.meta_path:
        sys.meta_path.insert(0, ChainerFinder)
        if os.environ.get(NAMES_VARIABLE) == 'all':
            from chainer_compat.names import python_names

            python_names.restore()


def _is_on(name: str) -> bool:
    return os.environ.get(name, '').strip().lower() not in OFF


def __getattr__(name: str) -> object:
    """Import the conversion to PyTorch and ONNX when it is used."""
    if name not in CONVERSION:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    import importlib

    module = importlib.import_module(f'{__name__}.pytorch.conversion.{CONVERSION[name]}')
    return getattr(module, name)


def restore_numpy_aliases() -> None:
    """Restore names that NumPy removed, such as ``np.float``, here and in new child processes.

    Call it once at the top of a script, before other imports. The environment variable
    ``CHAINER_COMPAT_NUMPY_ALIASES=1`` does the same without changing the script.
    """
    import numpy

    from chainer_compat.names import numpy_aliases

    os.environ[ALIASES_VARIABLE] = '1'  # for children that are not forked
    numpy_aliases.restore(numpy)


def restore_names() -> None:
    """Restore what NumPy, CuPy and Python removed, here and in new child processes.

    This includes names such as ``np.float``, ``cupy.core.core.ndarray`` and
    ``collections.Mapping``, array methods, the module ``imp``, and calls that NumPy now rejects,
    such as ``float(np.ones(1))``.

    Call it once at the top of a script, before other imports. The environment variable
    ``CHAINER_COMPAT_NAMES=all`` does the same without changing the script.
    """
    import numpy

    from chainer_compat.names import cupy_names, numpy_aliases, python_names

    os.environ[NAMES_VARIABLE] = 'all'  # for children that are not forked
    python_names.restore()
    numpy_aliases.restore(numpy)
    if not {ChainerFinder, cupy_names.CupyFinder} & {*sys.meta_path}:
        sys.meta_path.insert(0, cupy_names.CupyFinder)
    cupy_names.restore()


def _overlay() -> str:
    """Return the folder that contains ChainerMN 8."""
    here = os.path.dirname(os.path.abspath(__file__))
    inside = os.path.join(here, '_overlay')
    # Only wheels have that folder; with an editable install, it is the repository root.
    return inside if os.path.isdir(inside) else os.path.dirname(here)


def _insert_before_site_packages(folder: str) -> None:
    site = sys.modules.get('site')  # absent only under python -S, which reads no .pth either
    if site is None:
        return
    # While site.py reads a virtual environment's .pth files, PREFIXES belongs to the base Python.
    folders = {site.USER_SITE, *site.getsitepackages([sys.prefix, *site.PREFIXES])}
    path = sys.path
    first = next((i for i, entry in enumerate(path) if entry in folders), len(path))
    # Entries before ``first`` belong to the user: the script's folder and PYTHONPATH.
    if folder not in path[:first]:
        path.insert(first, folder)


class ChainerFinder:
    """Finds Chainer's modules as usual and replaces the loader of modules that need patches."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):  # type: ignore[no-untyped-def]
        """Handle imports of Chainer, NumPy and CuPy; Python calls this for every import."""
        if name == 'chainer':
            from chainer_compat.patching import variables

            variables.check((COMPAT_VARIABLE, OVERLAY_VARIABLE, ALIASES_VARIABLE))
            variables.check_variables_of_chainer()
        if name == 'chainer' or name.startswith('chainer.'):
            from chainer_compat import shims  # noqa: F401  (fills the registry)
            from chainer_compat.patching import loader

            return loader.find_spec(cls, name, path, target)
        if name == 'onnx_chainer':
            from chainer_compat.pytorch.conversion import onnx_chainer

            onnx_chainer.check()
        if name == 'numpy' and {ALIASES_VARIABLE, NAMES_VARIABLE} & os.environ.keys():
            from chainer_compat.names import numpy_aliases

            return numpy_aliases.find_spec(cls, name, path, target)
        if name.startswith('cupy'):
            from chainer_compat.names import cupy_names

            return cupy_names.find_spec(cls, name, path, target)
        return None
