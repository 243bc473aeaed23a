"""PyTorch's kernels under Chainer's functions.

Chainer computes on the CPU with NumPy, which has no convolutions, and on GPUs without cuDNN, since
CuPy 14 dropped it. Where PyTorch is installed, some functions of Chainer call its kernels instead.
Scripts do not change: arrays stay NumPy or CuPy arrays, and share their memory with tensors.

``chainer.config.use_torch`` selects, for each call, who computes:

- ``'auto'`` (default): PyTorch, if it is installed, on the CPU and on GPUs that it can use, unless
  CuPy has cuDNN;
- ``'always'``: also on GPUs for which CuPy has cuDNN;
- ``'never'``: Chainer.

The environment variable ``CHAINER_USE_TORCH`` sets the default. What PyTorch does not support,
Chainer computes, without a message. ``python -m chainer_compat`` shows what is used.

:data:`KERNELS`, :data:`OF_IMAGES` and :data:`BACKWARD` list the functions. ``dispatch`` decides for
each call, ``arrays`` converts, ``memory_format`` selects the order of elements in memory,
``compute_dtype`` the dtype in which matrices are multiplied, and ``memory`` and ``threads`` set
options of the process. ``recording`` records runs of functions on the CPU, by the table in
``chainer_compat.expressions``, and ``runs`` computes their gradients. Each of the other modules
contains the kernels of one family. They are imported with PyTorch, at the first call.
"""

from __future__ import annotations

#: Functions and methods of Chainer, by module, and the kernels that replace them.
KERNELS: dict[str, dict[str, str]] = {
    'chainer.functions.connection.convolution_2d': {
        'Convolution2DFunction._forward_cpu_core': 'convolution.output',
        'Convolution2DFunction._forward_gpu_core': 'convolution.output',
        'Convolution2DFunction._forward_grouped_convolution': 'convolution.output',
        'Convolution2DGradW._forward_cpu_core': 'convolution.weight_gradient',
        'Convolution2DGradW._forward_gpu_core': 'convolution.weight_gradient',
        'Convolution2DGradW._forward_grouped_convolution': 'convolution.weight_gradient',
    },
    'chainer.functions.connection.deconvolution_2d': {
        'Deconvolution2DFunction._forward_cpu_core': 'convolution.input_gradient',
        'Deconvolution2DFunction._forward_gpu_core': 'convolution.input_gradient',
        'Deconvolution2DFunction._forward_grouped_convolution': 'convolution.input_gradient',
    },
    'chainer.functions.connection.convolution_nd': {
        'ConvolutionND._forward_xp': 'convolution.output',
        'ConvolutionNDGradW._forward_xp': 'convolution.weight_gradient',
    },
    'chainer.functions.connection.deconvolution_nd': {
        'DeconvolutionND._forward_xp': 'convolution.input_gradient',
    },
    'chainer.functions.connection.linear': {
        'LinearFunction.forward': 'linear.output',
        'LinearGradData.forward': 'linear.input_gradient',
        'LinearGradWeight.forward': 'linear.weight_gradient',
    },
    'chainer.functions.normalization.batch_normalization': {
        'GeneralBatchNormalizationImpl.forward': 'batch_normalization.forward',
        'GeneralBatchNormalizationImpl.backward': 'batch_normalization.backward',
        'BatchNormalization.forward': 'batch_normalization.output',
        '_apply_bn_fwd': 'batch_normalization.normalize',
    },
    'chainer.functions.normalization.local_response_normalization': {
        'LocalResponseNormalization.forward_cpu': 'local_response.output',
        'LocalResponseNormalizationGrad.forward_cpu': 'local_response.gradient',
    },
    'chainer.functions.pooling.max_pooling_nd': {
        'MaxPoolingND.forward_cpu': 'pooling.maximum',
        'MaxPoolingNDGrad.forward_cpu': 'pooling.maximum_gradient',
    },
    'chainer.functions.pooling.average_pooling_2d': {
        'AveragePooling2D.forward_cpu': 'pooling.average',
        'AveragePooling2DGrad.forward_cpu': 'pooling.average_gradient',
    },
    'chainer.functions.rnn.n_step_lstm': {'n_step_lstm_base': 'n_step_rnn.lstm'},
    'chainer.functions.rnn.n_step_gru': {'n_step_gru_base': 'n_step_rnn.gru'},
    'chainer.functions.rnn.n_step_rnn': {'n_step_rnn_base': 'n_step_rnn.rnn'},
    'chainer.links.rnn.n_step_rnn': {'NStepRNNBase._call': 'n_step_rnn_links.call'},
    'chainer.functions.activation.relu': {
        'ReLU.forward_cpu': 'activation.relu',
        'ReLUGrad2.forward_cpu': 'activation.relu_gradient',
    },
    'chainer.functions.activation.leaky_relu': {
        'LeakyReLU.forward_cpu': 'activation.leaky_relu',
        '_LeakyReLUGrad.forward_cpu': 'activation.leaky_relu_gradient',
    },
    'chainer.functions.activation.log_softmax': {'_log_softmax': 'softmax.log_softmax'},
    'chainer.functions.activation.softmax': {
        'Softmax.forward': 'softmax.softmax',
        '_SoftmaxGrad.forward': 'softmax.softmax_gradient',
    },
    'chainer.functions.connection.embed_id': {'EmbedIDGrad.forward': 'embedding.gradient'},
}

#: The same, of functions whose kernels only apply to images with channels last, which the kernels
#: above return. So they do not import PyTorch.
OF_IMAGES: dict[str, dict[str, str]] = {
    'chainer.functions.math.average': {'Mean.forward': 'reduction.mean'},
    'chainer.functions.math.sum': {'Sum.forward': 'reduction.total'},
    'chainer.functions.noise.dropout': {'Dropout.forward_cpu': 'dropout.output'},
}

#: The same as :data:`KERNELS`, of methods that compute gradients by several functions if they are
#: part of a graph.
BACKWARD: dict[str, dict[str, str]] = {
    'chainer.functions.activation.leaky_relu': {
        'LeakyReLU.backward': 'activation.leaky_relu_backward'},
    'chainer.functions.activation.relu': {'ReLU.backward': 'activation.relu_backward'},
    'chainer.functions.connection.convolution_2d': {
        'Convolution2DFunction.backward': 'convolution.gradients'},
    'chainer.functions.connection.deconvolution_2d': {
        'Deconvolution2DFunction.backward': 'convolution.deconvolution_gradients'},
    'chainer.functions.connection.linear': {'LinearFunction.backward': 'linear.gradients'},
    'chainer.functions.normalization.batch_normalization': {
        'BatchNormalization.backward': 'batch_normalization.gradients'},
}
