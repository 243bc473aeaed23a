"""Changes in setuptools since Chainer 7.8.1: version 82 removed ``pkg_resources``."""

from chainer_compat._patch import edit


@edit('chainer._environment_check')
def dependency_check() -> dict[str, str]:
    """All versions: importing pkg_resources warns and is slow, if it exists at all.

    The check warned about every CuPy other than 7. CuPy itself now warns if it is installed
    twice, so ``import chainer`` does not check it.
    """
    return {
        'import pkg_resources': '',
        '    _check_optional_dependencies()': '',
    }


@edit('chainer.testing.helper', 'chainer.testing.doctest_helper')
def requirements() -> dict[str, str]:
    """All versions: ``testing.with_requires('numpy>=1.10')`` works without pkg_resources."""
    return {'import pkg_resources': 'from chainer_compat import requirements as pkg_resources'}
