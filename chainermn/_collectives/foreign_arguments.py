"""Errors for arguments that an operation does not accept, such as arguments of other libraries."""
from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence

#: Replacements for arguments of PyTorch, Horovod and mpi4py.
_INSTEAD = {
    'async_op': 'Operations on arrays block, except isend and irecv. To average gradients in the '
                'background, create the optimizer with overlap=True.',
    'average': 'For the mean, call multi_node_mean(x).',
    'name': 'Operations have no names: all ranks call them in the same order.',
    'group': 'Call the operation on a communicator of the group: comm.new_group(ranks).',
    'process_set': 'Call the operation on a communicator of the group: comm.new_group(ranks).',
    'compression': 'Optimizers compress gradients: create_multi_node_optimizer(..., '
                   'compression=...).',
    'src': 'Use root= in collectives, source= in recv.',
    'dst': 'Use root= in collectives, dest= in send.',
    'root_rank': 'Use root=.',
    'buf': 'recv returns the array: x = comm.recv(source, tag).',
    'recvbuf': 'Operations return the result.',
    'sendbuf': 'Pass the array as the first positional argument.',
    'tensor': 'Pass the array as the first positional argument; the result is returned.',
    'prescale_factor': 'Multiply the array before the call.',
    'postscale_factor': 'Multiply the result.',
}


def better_error(error: Exception, name: str, method: Callable[..., object],
              args: Sequence[object], kwargs: Mapping[str, object]) -> Exception:
    """Return the error of an operation, or a clearer one if its arguments do not match.

    The clearer error has the signature of the operation.

    Args:
        error: The error that the operation raised.
        name: The name of the operation.
        method: The operation, whose first argument is the object that it belongs to.
        args: The positional arguments.
        kwargs: The keyword arguments.
    """
    if type(error) is not TypeError:
        return error
    signature = inspect.signature(method)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as reason:
        parameters = [each.replace(annotation=inspect.Parameter.empty)
                      for each in list(signature.parameters.values())[1:]]
        call = signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
        advice = [_INSTEAD[each] for each in kwargs
                  if each in _INSTEAD and each not in signature.parameters]
        return TypeError('. '.join([f'{reason}: call {name}{call}', *advice]))
    return error
