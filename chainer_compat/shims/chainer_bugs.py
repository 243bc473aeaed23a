"""Bugs of Chainer 7.8.1 itself that were mended after its last release, or never."""

import multiprocessing
from typing import Any

from chainer_compat._mend import edit, patch


@patch('chainer.functions.connection.deconvolution_2d')
def deconvolution_cover_all(deconvolution_2d: Any) -> None:
    """Serves every version: backward raised ValueError if only W, not x, needs a gradient."""
    function = deconvolution_2d.Deconvolution2DFunction
    set_cover_all = function._set_cover_all

    def of_shapes(self: Any, x: Any, W: Any) -> None:  # noqa: N803  (Chainer's name)
        # It takes shapes; one of its three callers gives it arrays.
        set_cover_all(self, getattr(x, 'shape', x), getattr(W, 'shape', W))

    function._set_cover_all = of_shapes


@edit('chainer.utils.conv', 'chainer.utils.conv_nd_kernel')
def large_columns() -> dict[str, str]:
    """Serves every version: on a GPU im2col and col2im counted in int32.

    From 2**31 elements on, convolutions without cuDNN read other memory than theirs.
    """
    one = "'(ptrdiff_t)1'"
    return {
        'int c0 = i / (kh * kw * out_h * out_w);': 'ptrdiff_t c0 = i / out_w / out_h / kw / kh;',
        'int ky = i / (kw * out_h * out_w) % kh;': 'int ky = i / out_w / out_h / kw % kh;',
        'int kx = i / (out_h * out_w) % kw;': 'int kx = i / out_w / out_h % kw;',
        'int c0 = i / (h * w);': 'ptrdiff_t c0 = i / w / h;',
        'int k = out_y': 'ptrdiff_t k = out_y',
        # in any number of dimensions
        "'int c0 = i / ({});'": "'ptrdiff_t c0 = i / ({});'",
        "'int {} = {} + {} * {};'": "'ptrdiff_t {} = {} + {} * {};'",
        'mulexp(ks + outs)': f'mulexp(ks + outs, {one})',
        'mulexp(ds)': f'mulexp(ds, {one})',
        'mulexp(tail)': f'mulexp(tail, {one})',
    }


@patch('chainer.iterators.multiprocess_iterator')
def worker_ended(multiprocess_iterator: Any) -> None:
    """Serves every version: MultiprocessIterator waited for ever for a worker that a signal ended.

    The pool starts another one, which knows nothing of what the first was loading.
    """
    loop = multiprocess_iterator._PrefetchLoop
    run_task = loop._task

    def task(self: Any) -> Any:
        if 'map_async' not in vars(self._pool):
            self._pool.map_async = _noticing(self._pool)
        return run_task(self)

    loop._task = task


def _noticing(pool: Any) -> Any:
    """The pool's ``map_async``, where ``get`` raises if a worker has ended since."""
    map_async = pool.map_async

    def begin(*args: Any) -> Any:
        workers = list(pool._pool)
        future = map_async(*args)
        get = future.get

        def get_or_notice(timeout: float) -> Any:
            try:
                return get(timeout)
            except multiprocessing.TimeoutError:
                ended = [worker for worker in workers if worker.exitcode is not None]
                if not ended or future.ready():
                    raise
            pool.terminate()  # what was lost would never be done, and closing waits for it
            raise RuntimeError(
                f'the worker process {ended[0].pid} of a MultiprocessIterator has ended, with '
                f'exit code {ended[0].exitcode}, and what it was loading is lost')

        future.get = get_or_notice
        return future

    return begin
