"""Shims that reduce the overhead per function of Chainer's computational graph."""

from types import ModuleType

from chainer_compat.patching.registry import edit, patch


@patch('chainer')
def quick_graph(module: ModuleType) -> None:
    """All versions: calls of functions and links had several times as much Python overhead."""
    from chainer_compat.graph import link_parameters, nodes

    module.FunctionNode.apply = nodes.quick_apply(module.FunctionNode.apply)
    module.Link.__call__ = nodes.quick_link_call(module.Link.__call__)
    module.Link.cleargrads = link_parameters.quick_cleargrads(module.Link.cleargrads)
    module.backend.get_device_from_array = nodes.quick_device(module.backend.get_device_from_array)
    module.variable._check_grad_type = nodes.quick_gradient_check(module.variable._check_grad_type)
    nodes.keep_tensors(module)


@edit('chainer._backprop')
def device_of_backward() -> dict[str, str]:
    """All versions: ``backward`` looked up the device of each function, even on the CPU."""
    return {
        'with chainer.using_device(\n'
        '                backend.get_device_from_array(*(in_data + out_grad_array))):':
            'from chainer_compat.graph.nodes import device_context\n'
            '        with device_context(in_data + out_grad_array):'}


@edit('chainer._backprop')
def gradients_within_backward() -> dict[str, str]:
    """All versions: an outer ``backward`` overwrote the gradients of an inner ``backward``.

    If a function called ``backward`` itself, as F.forget does, the gradients of parameters that
    other functions also used were wrong.
    """
    return {
        '            x_var._set_grad_var_without_check(gx)\n'
        '            x_var._loss_scale':
            '            from chainer_compat.graph.nodes import set_gradient; '
            'set_gradient(x_var, gx)\n'
            '            x_var._loss_scale'}
