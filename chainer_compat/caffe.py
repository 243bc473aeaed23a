"""Caffe's files as Chainer describes them, or an error that says what they need."""

try:
    from chainer.links.caffe.protobuf3 import caffe_pb2 as caffe_pb
except TypeError as e:  # what protobuf raises
    raise ImportError(
        "Chainer's reader and writer of Caffe models need protobuf 3, of which this environment "
        'has a later version. ChainerMN 8 does not mend them. With the environment variable '
        'PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python they may work, slowly: convert the '
        'model to NPZ in a process of its own, and read that.'
    ) from e

__all__ = ['caffe_pb']
