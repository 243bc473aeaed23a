"""Replaces cupy.random._generator_api, which is compiled device code and cannot run on a CPU."""


def _unsupported(*args, **kwargs):
    raise NotImplementedError(
        'the virtual GPU has no cupy.random.Generator; use cupy.random.RandomState')


class Generator:
    """Raises an error."""

    __init__ = _unsupported


class FeistelBijection:
    """Raises an error."""

    __init__ = _unsupported


init_curand = random_raw = _unsupported
