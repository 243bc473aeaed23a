"""The state of each thread: operation, communicator, call, peers and call site."""

import os
import pickle
import re
import threading
from typing import NamedTuple

import chainermn
from chainermn._diagnostics import thread_state
from chainermn._diagnostics.deadlocks.rank_state import ThreadState
from chainermn._operations.call import entered
from chainermn._operations.table import END


class Observed(NamedTuple):
    state: ThreadState
    progress: tuple
    timeout: float
    is_finished: bool


def observed(function):
    """All threads of this process at one point of a function, as another thread sees them."""
    found = {}

    def observe():
        def target():
            found.update({ident: Observed(each.state, each.progress, each.timeout, each.is_finished)
                          for ident, each in thread_state.snapshots().items()})

        thread = threading.Thread(target=target)
        thread.start()
        thread.join()

    function(observe)
    return found


def main(found):
    return found[threading.main_thread().ident]


def line_in(function, offset):
    """The call site in a function."""
    return (f'test_thread_state.py:{function.__code__.co_firstlineno + offset} in '
            f'{function.__name__}()')


class Observes:
    """Pickling it is the point of observation."""

    def __init__(self, observe):
        self.observe = observe

    def __reduce__(self):
        self.observe()
        return str, ()


@entered(END)
def end(observe):
    observe()


@entered('operation')
def operation(owner, observe):
    observe()


def test_in_a_collective(naive, monkeypatch):
    check = naive._context.check
    same = check.same

    def call(observe):
        with monkeypatch.context() as patch:
            patch.setattr(check, 'same', lambda *args: (same(*args), observe())[0])
            naive.barrier()

    found = main(observed(call))
    state = found.state
    assert (state.operation, state.call) == ('barrier', 'barrier #1')
    assert [wait.key for wait in state.waits] == [naive._flight_records()[0].key]
    assert state.call_site == line_in(call, 3)
    of = f' of {state.communicator}' if state.communicator else ''
    assert state.text == f'in barrier #1{of}, called at {line_in(call, 3)}'
    assert pickle.loads(pickle.dumps(state)) == state
    assert found.progress[0] == 'barrier'
    assert [calls for calls, _ in found.progress[1:]] == [*naive._flight_records()]


def test_the_call_site_is_that_of_the_outermost_operation(naive):
    def call(observe):
        naive.allgather_obj(Observes(observe))

    state = main(observed(call)).state
    # It pickles before it records the call.
    assert (state.operation, state.call, state.call_site) == (
        'allgather_obj', '', line_in(call, 1))


def test_progress_includes_the_calls_of_nested_operations(naive):
    other = chainermn.create_communicator('naive')

    def call(observe):
        operation(naive, lambda: operation(other, observe))

    first = main(observed(call))
    assert [wait.key for wait in first.state.waits] == [
        each._flight_records()[0].key for each in (other, naive)]
    assert main(observed(call)).progress == first.progress
    other.barrier()
    assert main(observed(call)).progress != first.progress
    other.finalize()


def test_in_the_shutdown():
    found = main(observed(end))
    assert found.is_finished and found.progress
    assert found.state.text == 'at the end of the script'


def test_other_threads_are_seen_in_operations_only(naive):
    found = {}

    def run(name, function):
        def target():
            found[name] = observed(function), threading.get_ident()

        thread = threading.Thread(target=target, name=name)
        thread.start()
        thread.join()
        return found[name]

    threads, ident = run('loader', lambda observe: operation(naive, observe))
    assert threads[ident].state.thread == 'loader'
    assert threads[ident].state.text.endswith(' in thread loader')
    threads, ident = run('idle', lambda observe: observe())
    assert ident not in threads and main(threads).progress == ()



def test_stacks_show_the_program_and_the_operation(naive, monkeypatch):
    def stack(call):
        """The stack of the main thread, in which ``call`` observes, as the watchdog sees it."""
        found = []

        def observe():
            thread = threading.Thread(target=lambda: found.append(thread_state.stacks()))
            thread.start()
            thread.join()

        call(observe)
        return found[0].partition('\nThread ')[0]

    def program(observe):
        naive.allgather_obj(Observes(observe))

    package = os.path.dirname(chainermn.__file__)
    shown = stack(program)
    assert shown.startswith('Thread MainThread:\n')
    assert package not in shown
    assert shown.endswith('\n  in allgather_obj')
    assert ', in program\n    naive.allgather_obj(Observes(observe))\n' in shown
    # Without an operation, what the thread waits for in the standard library.
    assert re.search(r'/threading.py", line \d+, in \w+\n.*$', stack(lambda observe: observe()))
    monkeypatch.setenv('CHAINERMN_DEBUG', '1')
    assert f'  File "{package}' in stack(program)
