"""Looks up all names of a file, the variable RECORD, with ``CHAINER_COMPAT_NAMES=all``.

Prints how many are restored, how many errors say what to do instead, and all other names.
"""

import importlib
import os
import pathlib
import warnings

restored, explained, unknown = [], [], []


def failed(name: str, error: Exception) -> None:
    """Count an error; a library of CUDA that is not installed does not count."""
    if 'open shared object file' in str(error) or 'Failure finding' in str(error):
        return
    (explained if '\n' in str(error) else unknown).append(name)


def why_no_module(name: str) -> ImportError | None:
    """Return why a module cannot be imported; CuPy 13 hides this for cupy.sparse.linalg."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:  # it is no module
        return None
    except ImportError as error:
        return error
    return None


warnings.simplefilter('ignore')
for line in pathlib.Path(os.environ['RECORD']).read_text().splitlines():
    path, _, names = line.partition(':')
    try:
        module = importlib.import_module(path)
        restored.append(path)
    except ImportError as error:
        failed(path, error)
        continue
    if getattr(module, 'available', True) is False:
        continue
    for name in names.split():
        try:
            getattr(module, name)
            restored.append(f'{path}.{name}')
        except (AttributeError, ImportError) as error:
            failed(f'{path}.{name}', why_no_module(f'{path}.{name}') or error)
print(len(restored), len(explained), *unknown)
for path in ('cupy.core.core.ndarray', 'cupy.util.memoize', 'cupy.core.fusion.where',
             'cupyx.scipy.sparse.csr.csr_matrix', 'cupy.testing.helper.for_all_dtypes'):
    assert path in restored, path
