"""Laws: two runs of any random program give the same results. Each law detects a planted fault.

    @law(programs(), fault=planted(MeanQueue, 'put', lambda put: twice(put)))
    def test_overlap(comm, program):
        \"\"\"``overlap=True``: the same parameters as without.\"\"\"
        assert_same(train(comm, program, overlap=True), train(comm, program))

makes three tests. ``[holds]`` checks the law with a few programs that Hypothesis draws. Two tests
are marked slow: ``[fault]`` plants the fault in the package and fails if no program breaks the law,
and ``[many]`` runs more programs and shrinks a program that breaks the law to the smallest one.

``LAWS_EXAMPLES=10000 pytest -m slow tests/laws`` runs more programs. ``LAWS_SEED=1`` draws
different programs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import signal
import sys
import threading
import traceback
import unittest.mock
import zlib
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from mpi4py import MPI
from shared_fixtures import create
from time_limits import seconds

Fault = Callable[[], contextlib.AbstractContextManager[object]]

MANY = 2  # factor for the number of programs in a slow run
UNTIL_FOUND = 20  # factor for the maximum number of programs until one finds the fault
LIMIT = 3600  # time limit of a slow run in seconds

_capture: Any = None  # pytest's plugin
_mpi_comm = MPI.COMM_WORLD.Dup()  # separates these messages from the messages of the programs


class LawError(AssertionError):
    """Two runs differ, but a law says that they are the same. All ranks raise this error."""


def law(
    programs: st.SearchStrategy[Any], fault: Fault, examples: int = 4
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that makes tests of a law.

    The decorated function gets a ``program`` and fixtures. If it has an argument ``comm``, it also
    gets a communicator, of the type in the program's attribute ``communicator`` or else 'flat'.
    Ranks may fail independently, but only after their last communication.

    Args:
        programs: Strategy that draws a program, the same on all ranks.
        fault: Function that returns a context in which the package breaks the law.
        examples: The number of programs.
    """
    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def check(is_faulty: bool, n: int, phases: tuple[hypothesis.Phase, ...],
                  fixtures: dict[str, object]) -> None:
            @hypothesis.seed(
                zlib.crc32(body.__name__.encode()) + int(os.environ.get('LAWS_SEED', 0)))
            @hypothesis.settings(
                max_examples=n, phases=phases, database=None, deadline=None,
                report_multiple_bugs=False, suppress_health_check=list(hypothesis.HealthCheck))
            @hypothesis.given(program=programs)
            def hold(program: object) -> None:
                own = {'comm': comms[getattr(program, 'communicator', 'flat')]} if has_comm else {}
                _run(functools.partial(body, **own, **fixtures), program)

            has_comm = 'comm' in inspect.signature(body).parameters
            # Do not share communicators with other tests: a fault may leave one in any state.
            with contextlib.closing(Communicators()) as comms:
                if is_faulty:
                    with pytest.raises(LawError):
                        hold()
                else:
                    hold()

        @pytest.mark.parametrize('mode', [
            'holds', pytest.param('fault', marks=pytest.mark.slow),
            pytest.param('many', marks=[pytest.mark.slow, pytest.mark.limit(LIMIT)])])
        @functools.wraps(body)
        def run(mode: str, request: pytest.FixtureRequest, **fixtures: object) -> None:
            global _capture
            _capture = request.config.pluginmanager.getplugin('capturemanager')
            phases = (hypothesis.Phase.generate,)
            if mode == 'holds':
                check(False, examples, phases, fixtures)
            elif mode == 'fault':
                with fault():
                    check(True, UNTIL_FOUND * examples, phases, fixtures)
            else:
                n = int(os.environ.get('LAWS_EXAMPLES', MANY * examples))
                check(False, n, (*phases, hypothesis.Phase.shrink), fixtures)

        signature = inspect.signature(body).parameters
        names = ['mode', 'request', *sorted({*signature} - {'comm', 'program'})]
        run.__signature__ = inspect.Signature([  # type: ignore[attr-defined]
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names])
        return run

    return decorate


def planted(target: object, name: str, change: Callable[[Any], Any]) -> Fault:
    """Return a fault: an attribute of the package that is replaced by ``change(attribute)``."""
    def fault() -> contextlib.AbstractContextManager[object]:
        original = inspect.getattr_static(target, name)
        if isinstance(original, (classmethod, staticmethod)):
            changed: object = type(original)(change(original.__func__))
        else:
            changed = change(original)
        return unittest.mock.patch.object(target, name, changed)
    return fault


class Communicators(dict[str, Any]):
    """Communicators by type, created when a program needs them. Collective: every rank uses it."""

    def __missing__(self, name: str) -> Any:
        self[name] = create(name)
        return self[name]

    def close(self) -> None:
        """Finalize the communicators. Collective: every rank calls it."""
        for comm in self.values():
            comm.finalize()


def _run(body: Callable[..., None], program: object) -> None:
    """Run one program. If the law is broken on any rank, raise the same error on all ranks."""
    text = ''
    digests = _mpi_comm.allgather(repr(program))
    assert len(set(digests)) == 1, f'the ranks drew different programs: {digests}'
    try:
        body(program=program)
    except hypothesis.errors.UnsatisfiedAssumption:
        text = 'assume'  # on all ranks, because they have the same program
    except (Exception, pytest.fail.Exception):
        text = traceback.format_exc()
    texts = _exchange(text)
    if set(texts) == {'assume'}:
        hypothesis.reject()
    if any(texts):
        failed = '\n'.join(f'rank {rank} of {len(texts)}:\n{text}'
                           for rank, text in enumerate(texts) if text)
        raise LawError(failed)  # Hypothesis adds the program


def _exchange(text: str) -> list[str]:
    """Return the errors of all ranks. Kill the job if only this rank failed and the others wait."""
    timer = threading.Timer(seconds(15), _give_up, [text])
    if text:
        timer.start()
    try:
        return _mpi_comm.allgather(text)
    finally:
        timer.cancel()


def _show(text: str) -> None:
    """Print a text immediately, although pytest captures the output of tests."""
    assert _capture is not None
    _capture.suspend()
    print(text, file=sys.__stderr__, flush=True)


def _give_up(text: str) -> None:
    _show(f'\nonly rank {_mpi_comm.rank} failed:\n{text}')
    os.kill(os.getpid(), signal.SIGKILL)
