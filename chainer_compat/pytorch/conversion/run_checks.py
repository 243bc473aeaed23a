"""Checks that two runs of a model call the same functions, and that these have expressions."""

from __future__ import annotations

from typing import Any

from chainer_compat.pytorch.conversion.errors import ADVICE, ConversionError
from chainer_compat.pytorch.conversion.references import (
    NumpyFunction,
    Reference,
    TracedCall,
    flattened,
    mapped,
)
from chainer_compat.pytorch.expressions import EXPRESSIONS, NOT_EXPRESSIBLE


def check_outputs(first: Any, second: Any) -> None:
    """Raise an error if the results have different structures or contain no array."""
    if repr(mapped(first, lambda _: 0)) != repr(mapped(second, lambda _: 0)):
        raise ConversionError(
            'The model cannot be converted: the structure of its outputs differs between two runs, '
            f'so its control flow depends on the inputs. {ADVICE}.')
    if not any(isinstance(each, Reference) for each in flattened(first)):
        raise ConversionError('The model returns no array. Use call= to convert a function that '
                              'returns its results.')


#: Why a function has no expression, by its package.
_REASONS = {
    'chainer': 'it is not supported',
    'chainermn': 'it communicates with other ranks. Convert a model that one rank can compute, and '
                 'copy the parameters of the other ranks to it',
    '': 'it is not a Chainer function. Use a Chainer function, or use call= to convert a '
        'function that does not call it'}


def check_expressions(calls: list[TracedCall]) -> None:
    """Raise an error if a function has no expression in PyTorch."""
    unknown: dict[str, str] = {}
    for call in calls:
        if not isinstance(call.function, NumpyFunction) and call.name not in EXPRESSIONS:
            package, _, _ = type(call.function).__module__.partition('.')
            reason = NOT_EXPRESSIBLE.get(call.name, _REASONS.get(package, _REASONS['']))
            unknown.setdefault(call.name, f'{call.label}: {reason}')
    if unknown:
        raise ConversionError('These functions have no expression in PyTorch: '
                              + '; '.join(unknown.values()) + '.')


def check_equal(first: list[TracedCall], second: list[TracedCall]) -> None:
    """Raise an error if the runs called different functions."""
    for one, other in zip(first, second, strict=False):
        if one.name != other.name:
            raise ConversionError(
                'The model cannot be converted: its control flow depends on the inputs. In two '
                f'runs, it called {one.label} and {other.label}. {ADVICE}.')
    if len(first) != len(second):
        last = max(first, second, key=len)[min(len(first), len(second))]
        raise ConversionError(
            'The model cannot be converted: its control flow depends on the inputs. It called '
            f'{last.label} in only one of two runs. {ADVICE}.')


def differ() -> ConversionError:
    """Return the error for a value whose origin differs between the two runs."""
    return ConversionError('its inputs come from different functions in two runs, because control '
                           'flow, or a value taken out of the graph, depends on the inputs. '
                           f'{ADVICE}')
