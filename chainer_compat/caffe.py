"""Caffe's files as Chainer describes them, or an error that says what they need."""

from types import ModuleType


# Not at the top: Chainer's package of the description asks for it while it is imported itself.
def __getattr__(name: str) -> ModuleType:
    if name != 'caffe_pb':
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    try:
        from chainer.links.caffe.protobuf3 import caffe_pb2
    except TypeError as e:  # what protobuf raises
        raise ImportError(
            "Chainer's reader and writer of Caffe models need protobuf 3, of which this "
            'environment has a later version. ChainerMN 8 does not mend them. With the environment '
            'variable PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python they may work, slowly: convert '
            'the model to NPZ in a process of its own, and read that.'
        ) from e
    description: ModuleType = caffe_pb2
    return description
