"""What CuPy removed or changed since Chainer 7.8.1."""

from types import ModuleType

from chainer_compat._mend import patch, version


@patch('chainer.backends.cuda')
def cudnn_warning(cuda: ModuleType) -> None:
    """CuPy >= 14 has no cuDNN, yet the first use of a GPU advised to install it."""
    if version('cupy') >= (14, 0):
        cuda.check_cuda_available._already_warned = True
