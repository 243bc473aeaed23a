"""A compressor that fails in one of its calls."""

from chainermn.communicators.compression import Fp16


class Fails(Fp16):
    """Raises an error in the given call of a method, if any."""

    def __init__(self, method='', call=0):
        self.method, self.left = method, call

    def count(self, method):
        self.left -= method == self.method
        if method == self.method and self.left == 0:
            raise MemoryError('too much')

    def compress(self, x, key=None):
        self.count('compress')
        return super().compress(x, key)

    def decompress(self, encoded, size, dtype):
        self.count('decompress')
        return super().decompress(encoded, size, dtype)
