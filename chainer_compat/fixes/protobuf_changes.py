"""Changes in protobuf since Chainer 7.8.1."""

from chainer_compat.patching.registry import edit


@edit('chainer.links.caffe.caffe_function', 'chainer.exporters.caffe')
def caffe() -> dict[str, str]:
    """Protobuf >= 4 rejects Chainer's description of Caffe files. Now the error says why.

    Caffe is not supported; its last release was in 2017.
    """
    return {
        'from chainer.links.caffe.protobuf3 import caffe_pb2 as caffe_pb':
        'from chainer_compat.fixes.caffe import caffe_pb',
    }
