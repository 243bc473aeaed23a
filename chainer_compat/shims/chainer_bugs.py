"""Bugs of Chainer 7.8.1 itself that were mended after its last release, or never."""

from chainer_compat._mend import edit


@edit('chainer.functions.connection.deconvolution_2d')
def deconvolution_cover_all() -> dict[str, str]:
    """Serves every version: backward raised ValueError if only W, not x, needs a gradient."""
    return {'self._set_cover_all(x, W)': 'self._set_cover_all(x.shape, W.shape)'}
