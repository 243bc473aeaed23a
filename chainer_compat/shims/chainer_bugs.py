"""Bugs of Chainer 7.8.1 itself that were mended after its last release, or never."""

from typing import Any

from chainer_compat._mend import patch


@patch('chainer.functions.connection.deconvolution_2d')
def deconvolution_cover_all(deconvolution_2d: Any) -> None:
    """Serves every version: backward raised ValueError if only W, not x, needs a gradient."""
    function = deconvolution_2d.Deconvolution2DFunction
    set_cover_all = function._set_cover_all

    def of_shapes(self: Any, x: Any, W: Any) -> None:  # noqa: N803  (Chainer's name)
        # It takes shapes; one of its three callers gives it arrays.
        set_cover_all(self, getattr(x, 'shape', x), getattr(W, 'shape', W))

    function._set_cover_all = of_shapes
