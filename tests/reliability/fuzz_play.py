"""Plays a sequence of calls on a communicator, and returns the faults on all ranks."""
from __future__ import annotations

from typing import Any

import numpy as np
from fuzz_calls import Collective, Messages
from fuzz_compare import Outcomes, digest, equal, is_right, shares, short
from fuzz_errors import Call
from fuzz_messages import send_and_receive
from fuzz_model import Fails, expected
from fuzz_values import Array, Arrays, Object

import chainermn


def play(control: Any, name: str, steps: Any, counts: dict[str, int]) -> list[str]:
    """Plays a sequence on a new communicator.  Collective: every rank calls it.

    Args:
        control: MPI communicator for comparing outcomes.
        name: The name of the communicator.
        steps: The sequence.
        counts: The number of outcomes by kind; updated.

    Returns:
        The faults, equal on all ranks.
    """
    comm = chainermn.create_communicator(name, control)
    for number, step in enumerate(steps):
        act = send_and_receive if isinstance(step, Messages) else _collective
        outcomes = act(comm, step)
        faults = [f'{name}, step {number}: {fault}'
                  for fault in _compared(control.allgather(outcomes), counts)]
        if faults:
            return faults  # later steps, and finalize, may wait forever
    comm.finalize()
    return []


def _compared(every: list[Outcomes], counts: dict[str, int]) -> list[str]:
    faults = []
    for key in sorted(set().union(*every), key=repr):
        ranks = {rank: outcomes[key] for rank, outcomes in enumerate(every) if key in outcomes}
        faults += [f'rank {rank}: {wrong}' for rank, (wrong, _) in ranks.items() if wrong]
        if len({repr(what) for _, what in ranks.values()}) > 1:
            faults.append(f'differs between ranks: {ranks}')
        counts['errors' if any(isinstance(what, tuple) for _, what in ranks.values())
               else 'values'] += 1
    return faults


# --- collective calls ------------------------------------------------------------------------

def _collective(comm: Any, step: Collective) -> Outcomes:
    if step.part is None:
        return {'call': _call(comm, step.calls)[0]}
    outcome, part = _call(comm, step.part)
    outcomes: Outcomes = {'part': outcome}
    if part is not None:
        members = expected(step.part).values[comm.rank]
        if not outcome[0]:
            calls = tuple(step.calls[rank] for rank in members)
            outcomes[('call', *members)] = _call(part, calls)[0]
        part.finalize()
    return outcomes


def _call(comm: Any, calls: tuple[Call, ...]) -> tuple[tuple[str, Any], Any]:
    """Make this rank's call; return the outcome and the result."""
    outcome, call = expected(calls), calls[comm.rank]
    arguments, keep, state = _made(call)
    before = [np.array(x, subok=True) for x in keep]
    try:
        if call.operation == 'refuse':
            comm.refuse('fuzz', call['error']('an error'))
        result = getattr(comm, call.operation)(**arguments)
        error = None
    except Exception as caught:
        result, error = None, caught
    changed = [f'argument {x!r} was {y!r}' for x, y in zip(keep, before, strict=True)
               if not equal(x, y)]
    if error is not None:
        shared = type(error).__name__, str(error)
        if isinstance(outcome, Fails) and isinstance(error, outcome.types):
            return (', '.join(changed), shared), None
        return (f'{call} raised {error!r} where {short(outcome)} was expected', shared), None
    if isinstance(outcome, Fails):
        return (f'{call} gave {short(result)} where {short(outcome)} was expected', None), None
    value = outcome.values[comm.rank]
    if call.operation in ('split', 'new_group') and value is not None:
        value = value.index(comm.rank), len(value)
    got = state(result, arguments, call)
    wrong = '' if is_right(got, value, outcome.close) else (
        f'{call} gave {short(got)} where {short(value)} was expected')
    if call.operation not in ('bcast', 'bcast_obj', 'allreduce'):
        changed += [f'{x} is shared' for x in keep if shares(got, x)]
    shared = digest(got) if outcome.same else None
    part = result if call.operation in ('split', 'new_group') else None
    return (', '.join([wrong] * bool(wrong) + changed), shared), part


def _made(call: Call) -> tuple[dict[str, Any], list[Any], Any]:
    """The arguments, the arrays that must not change, and the function that compares results."""
    arguments: dict[str, Any] = {}
    keep: list[Any] = []
    for name, value in call.arguments.items():
        made = value
        if isinstance(value, (Array, Arrays, Object)) or hasattr(value, 'make'):
            made = value.make()
            keep += [x for x in (made if isinstance(made, (tuple, list)) else [made])
                     if type(x) is np.ndarray and x.dtype != object]
        elif name == 'objs' and value is not None:
            made = [one.make() for one in value]
        arguments[name] = made
    if call.operation == 'refuse':
        return {}, [], None
    if call.operation == 'allreduce':
        arguments['x'], arguments['out'] = _with_out(call['x'], arguments['x'], call['out'])
        keep = [x for x in keep if call['out'] not in ('self', 'overlap')]
    return arguments, keep, _STATES.get(call.operation, lambda result, arguments, call: result)


def _with_out(spec: Array, x: Any, out: str | None) -> tuple[Any, Any]:
    if out is None or out == 'no array':
        return x, out
    if spec.is_bad:
        return x, np.zeros(2)
    shape, dtype = spec.shape, np.dtype(spec.dtype)
    if out == 'self' and spec.kind not in ('scalar', 'foreign'):
        return x, x
    if out == 'overlap' and spec.kind == 'plain':
        both = np.zeros(x.size + 1, dtype)
        first = both[:-1].reshape(shape)
        first[...] = x
        return first, both[1:].reshape(shape)
    made = np.empty((*shape, 2) if out == 'other shape' else shape,
                    ('int32' if dtype == 'int16' else 'int16') if out == 'other dtype' else dtype,
                    order='F' if out == 'fortran' else 'C')
    made.flags.writeable = out != 'read-only'
    return x, made


def _reduced(result: Any, arguments: dict[str, Any], call: Call) -> Any:
    out = arguments['out']
    return result if out is None or result is out else 'not out'


def _broadcast(result: Any, arguments: dict[str, Any], call: Call) -> Any:
    return np.array(result, np.dtype(call['x'].dtype)) if result is arguments['x'] else result


def _in_part(result: Any, arguments: dict[str, Any], call: Call) -> Any:
    return None if result is None else (result.rank, result.size)


_STATES = {
    'allreduce': _reduced,
    'bcast': _broadcast,
    'bcast_data': lambda result, arguments, call: [
        parameter.array for _, parameter in sorted(arguments['model'].namedparams())],
    'multi_node_mean_grad': lambda result, arguments, call: [
        None if parameter.array is None else parameter.grad
        for _, parameter in sorted(arguments['model'].namedparams())],
    'split': _in_part,
    'new_group': _in_part,
}
