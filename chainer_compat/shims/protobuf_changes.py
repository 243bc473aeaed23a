"""What protobuf removed since Chainer 7.8.1."""

from chainer_compat._mend import edit


@edit('chainer.links.caffe.caffe_function', 'chainer.exporters.caffe')
def caffe() -> dict[str, str]:
    """Protobuf >= 4 refuses Chainer's description of Caffe's files; that is said clearly.

    Caffe is not mended: its last release is of 2017.
    """
    return {
        'from chainer.links.caffe.protobuf3 import caffe_pb2 as caffe_pb':
        'from chainer_compat.caffe import caffe_pb',
    }
