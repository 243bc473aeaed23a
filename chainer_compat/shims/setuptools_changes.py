"""What setuptools removed since Chainer 7.8.1: all of ``pkg_resources``, in version 82."""

from chainer_compat._mend import edit


@edit('chainer._environment_check')
def dependency_check() -> dict[str, str]:
    """Serves every version: where pkg_resources is left, importing it warns and takes long.

    The check knew CuPy 7 as the newest and warned of any other; CuPy itself warns today
    if it is installed twice. So ``import chainer`` checks nothing.
    """
    return {
        'import pkg_resources': '',
        '    _check_optional_dependencies()': '',
    }


@edit('chainer.testing.helper', 'chainer.testing.doctest_helper')
def requirements() -> dict[str, str]:
    """Serves every version, as above; ``testing.with_requires('numpy>=1.10')`` keeps working."""
    return {'import pkg_resources': 'from chainer_compat import requirements as pkg_resources'}
