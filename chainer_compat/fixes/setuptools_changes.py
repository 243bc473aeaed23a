"""Changes in setuptools since Chainer 7.8.1: version 82 removed ``pkg_resources``."""

from chainer_compat.patching.registry import edit


@edit('chainer._environment_check')
def dependency_check() -> dict[str, str]:
    """All versions: pkg_resources is slow to import, deprecated, and absent in new setuptools.

    The check warned about every CuPy version other than 7. It is not needed to detect duplicate
    installations of CuPy, because CuPy itself now warns about them.
    """
    return {
        'import pkg_resources': '',
        '    _check_optional_dependencies()': '',
    }


@edit('chainer.testing.helper', 'chainer.testing.doctest_helper')
def requirements() -> dict[str, str]:
    """All versions: ``testing.with_requires('numpy>=1.10')`` works without pkg_resources."""
    return {
        'import pkg_resources': 'from chainer_compat.fixes import requirements as pkg_resources'}
