"""Runs many small cases in one test, which takes much less time than a test for each case.

    @each_case('operation, dtype', itertools.product(OPERATIONS, DTYPES))
    def test_values(comm, operation, dtype):
        ...

is like ``pytest.mark.parametrize``, but pytest sees one test, with one set of fixtures. All cases
run. If any of them fails on any rank, the test fails and lists the failed cases. The values can be
a function of pytest's configuration.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from mpi4py import MPI

_mpi_comm = MPI.COMM_WORLD.Dup()  # separates our messages from those of the tests


def each_case(
    names: str, values: Iterable[Any] | Callable[[pytest.Config], Iterable[Any]]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator of a test: a loop over the values of these arguments."""
    arguments = names.split(', ')
    if not callable(values):
        values = list(values)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(request: pytest.FixtureRequest, **fixtures: object) -> None:
            found = values(request.config) if callable(values) else values
            cases = [dict(zip(arguments, value if len(arguments) > 1 else (value,), strict=True))
                     for value in found]
            failed = [text for case in cases if (text := _failure(test, fixtures, case))]
            if failed:
                pytest.fail(f'{len(failed)} of {len(cases)} cases failed\n\n' + '\n'.join(failed),
                            pytrace=False)

        parameters = [inspect.signature(run, follow_wrapped=False).parameters['request']]
        parameters += [value for name, value in inspect.signature(test).parameters.items()
                       if name not in arguments]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def _failure(test: Callable[..., None], fixtures: dict[str, object], case: dict[str, object]
             ) -> str:
    """Run one case; return what failed on which rank, or ''.

    The ranks wait for each other, so that no rank runs ahead with the next case.
    """
    text = ''
    try:
        test(**fixtures, **case)
    except pytest.skip.Exception:
        text = 'a case cannot be skipped: leave it out of the values'
    except (Exception, pytest.fail.Exception):
        text = traceback.format_exc()
    if not _mpi_comm.allreduce(bool(text), MPI.LOR):
        return ''
    where = ', '.join(f'{name}={value!r}' for name, value in case.items())
    texts = _mpi_comm.allgather(text)
    return '\n'.join(f'{where} on rank {rank} of {len(texts)}:\n{text}'
                     for rank, text in enumerate(texts) if text)
