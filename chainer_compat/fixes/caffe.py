"""Chainer's protobuf description of Caffe files, or an error if protobuf is too new."""

from types import ModuleType


# Lazy, because the package of the description imports this module during its own import.
def __getattr__(name: str) -> ModuleType:
    if name != 'caffe_pb':
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    try:
        from chainer.links.caffe.protobuf3 import caffe_pb2
    except TypeError as e:  # raised by protobuf
        raise ImportError(
            'Reading and writing Caffe models with Chainer requires protobuf 3; this environment '
            'has a later version. Set the environment variable '
            'PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python. This is slow, so use it in a separate '
            'process that converts the model to NPZ, and load the NPZ file.'
        ) from e
    description: ModuleType = caffe_pb2
    return description
