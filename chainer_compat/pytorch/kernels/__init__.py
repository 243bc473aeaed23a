"""PyTorch kernels that compute single Chainer functions.

They are used on GPUs, and on the CPU when runs of functions are not recorded, for example with
function hooks. Each module contains the kernels of one family. It is imported at the first call,
together with PyTorch. :data:`KERNELS`, :data:`OF_IMAGES` and :data:`BACKWARD` list the functions.
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

#: Same as :data:`KERNELS`, for functions whose kernels only apply to images with channels last.
#: Only the kernels above return such images, so these kernels need not import PyTorch.
OF_IMAGES: dict[str, dict[str, str]] = {
    'chainer.functions.math.average': {'Mean.forward': 'of_images.mean'},
    'chainer.functions.math.sum': {'Sum.forward': 'of_images.total'},
    'chainer.functions.noise.dropout': {'Dropout.forward_cpu': 'of_images.dropout'},
}

#: Same as :data:`KERNELS`, for methods that compute gradients with several functions if the
#: gradients are part of a graph.
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
