"""Runs when Python starts: puts our chainermn first, and mends Chainer when it is imported.

A ``.pth`` file in site-packages imports this file and calls :func:`enable` in every Python
process of the environment, so nothing else is imported here: not even a module of ours.

Environment variables:
    CHAINERMN_OVERLAY: ``0`` leaves ``sys.path`` alone, and ``import chainermn`` finds the old
        package that Chainer carries.
    CHAINER_COMPAT: ``0`` leaves Chainer as it is.
"""

import os
import sys


def enable() -> None:
    """Makes ``import chainermn`` find ours, and ``import chainer`` work. Idempotent."""
    if os.environ.get('CHAINERMN_OVERLAY') != '0':
        _insert_before_site_packages(_overlay())
    if os.environ.get('CHAINER_COMPAT') != '0' and ChainerFinder not in sys.meta_path:
        sys.meta_path.insert(0, ChainerFinder)


def _overlay() -> str:
    """Returns the folder that holds our ``chainermn``."""
    here = os.path.dirname(os.path.abspath(__file__))
    inside = os.path.join(here, '_overlay')
    # Only a wheel has that folder; of an editable install it is the repository's root.
    return inside if os.path.isdir(inside) else os.path.dirname(here)


def _insert_before_site_packages(folder: str) -> None:
    site = sys.modules.get('site')  # absent only under python -S, which reads no .pth either
    if site is None:
        return
    # PREFIXES are those of the base Python while site.py reads a virtual environment's .pth files.
    folders = {site.USER_SITE, *site.getsitepackages([sys.prefix, *site.PREFIXES])}
    path = sys.path
    first = next((i for i, entry in enumerate(path) if entry in folders), len(path))
    # What stands before is the user's: the script's folder and PYTHONPATH.
    if folder not in path[:first]:
        path.insert(first, folder)


class ChainerFinder:
    """Finds Chainer's modules as Python does, and gives those that need it a mending loader."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):  # type: ignore[no-untyped-def]
        """Called by Python for every import; answers for Chainer's modules only."""
        if name != 'chainer' and not name.startswith('chainer.'):
            return None
        from chainer_compat import _mend

        return _mend.find_spec(cls, name, path, target)
