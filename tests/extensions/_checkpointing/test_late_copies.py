"""Copies have the values at the time of the checkpoint, even if the states change later."""
import copy
import io
import os
import threading
import weakref

import chainer
import numpy as np
import pytest
from each_case import each_case
from time_limits import seconds

from chainermn._process import runtime
from chainermn.extensions._checkpointing import late_copies, state
from chainermn.extensions._checkpointing.parts import SavedParts

pytestmark = pytest.mark.mpi_skip

ROWS, COLUMNS = 120, 150  # 72 KB


@pytest.fixture(autouse=True)
def small_states_are_copied_late():
    """Override the fixture that does this in other tests."""


@pytest.fixture(autouse=True)
def nothing_pending():
    yield
    late_copies.finish_copies()
    assert not is_pending()


def is_pending():
    return '_state' in vars(chainer.optimizer.UpdateRule)


def trained(optimizer=None):
    """Return an optimizer after two updates."""
    model = chainer.links.Linear(COLUMNS, ROWS)
    optimizer = (optimizer or chainer.optimizers.Adam()).setup(model)
    for _ in range(2):
        step(optimizer)
    return optimizer


def step(optimizer):
    for param in optimizer.target.params():
        param.grad = np.random.RandomState(optimizer.t).normal(0, 1, param.shape).astype('f')
    optimizer.update()


def states(optimizer):
    return {f'{path}/{name}': np.array(value) for path, param in optimizer.target.namedparams()
            for name, value in param.update_rule.state.items()}


def copied(optimizer):
    parts = SavedParts({'optimizer': optimizer})
    late = state.late_copies(parts)
    return state.copy_state(parts.whole, late), late


def begin(optimizer):
    """Begin to save; return the copies, the function that completes them, and what to expect."""
    expected = states(optimizer)
    return *copied(optimizer), expected


def check(arrays, expected):
    assert {name.removeprefix('optimizer'): array for name, array in arrays.items()
            if name.count('/') > 1 and not name.endswith('/t')}.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(arrays[f'optimizer{name}'], array)


class Rule(chainer.optimizer.UpdateRule):
    """A rule of a program."""

    def init_state(self, param):
        self.state['sum'] = np.zeros_like(param.array)

    def update_core_cpu(self, param):
        self.state['sum'] += param.grad
        param.array[...] -= self.state['sum']


class Own(chainer.optimizer.GradientMethod):
    def create_update_rule(self):
        return Rule(self.hyperparam)


def load(optimizer):
    other = trained(chainer.optimizers.Adam(alpha=.1))
    step(other)
    file = io.BytesIO()
    chainer.serializers.save_npz(file, other)
    file.seek(0)
    chainer.serializers.load_npz(file, optimizer)


def fill(read):
    def change(optimizer):
        for array in read(optimizer.target.W.update_rule).values():
            array[...] = -1
    return change


def hook(optimizer):
    """A hook of one parameter: the others are updated without it."""
    optimizer.target.W.update_rule.add_hook(
        lambda rule, param: rule.state['m'].fill(3), name='reset')
    step(optimizer)


CHANGES = {
    'state': fill(lambda rule: rule.state),
    '_state': fill(lambda rule: rule._state),
    'getattr': fill(lambda rule: getattr(rule, 'state')),  # noqa: B009
    'the state of a shallow copy': fill(lambda rule: copy.copy(rule).state),
    'load': load,
    'hook': hook,
    'update of one parameter': lambda optimizer: optimizer.target.W.update(),
    'update_core': lambda optimizer: optimizer.target.W.update_rule.update_core(
        optimizer.target.W),
    'another thread': lambda optimizer: in_thread(fill(lambda rule: rule.state), optimizer),
}


def in_thread(function, *args):
    thread = threading.Thread(target=function, args=args)
    thread.start()
    thread.join(seconds(60))


@each_case('name', list(CHANGES))
def test_whoever_changes_a_state_waits_for_the_copies(name):
    optimizer = trained()
    arrays, late, expected = begin(optimizer)
    assert is_pending()
    CHANGES[name](optimizer)
    assert not is_pending()
    late.finish()
    check(arrays, expected)
    assert any((array != states(optimizer)[key]).any() for key, array in expected.items())


class OwnState(Rule):
    _state = property(lambda self: self.own, lambda self, value: setattr(self, 'own', value))


class OwnSerialize(Rule):
    """Changes the state while it is saved."""

    def serialize(self, serializer):
        super().serialize(serializer)


class Wrapper:
    def __init__(self, target):
        self.target = target


def rule_of(rule):
    optimizer = Own()
    optimizer.create_update_rule = rule
    return optimizer


HOLDERS = {
    'array': lambda rule: rule.state['m'],
    'view': lambda rule: rule.state['m'][3:],
    'memory': lambda rule: memoryview(rule.state['m']),
    'dictionary': lambda rule: rule.state,
    'pointer': lambda rule: rule.state['m'].ctypes,
    'weak reference': lambda rule: weakref.ref(rule.state['m']),
    'iterator': lambda rule: iter(rule.state.values()),
}


@each_case('name', list(HOLDERS))
def test_an_array_that_the_program_holds_is_copied_immediately(name):
    optimizer = trained()
    held = HOLDERS[name](optimizer.target.W.update_rule)
    arrays, _, expected = begin(optimizer)
    np.testing.assert_array_equal(arrays['optimizer/W/m'], expected['/W/m'])
    assert is_pending() == (name not in ('dictionary', 'iterator'))  # they hold all
    assert held is not None


def test_arrays_of_other_kinds_are_copied_immediately():
    fortran, view, strided = trained(), trained(), trained()
    for optimizer, convert in (
            (fortran, np.asfortranarray), (view, lambda array: np.array(array).reshape(-1).reshape(
                array.shape)), (strided, lambda array: np.repeat(array, 2, -1)[..., ::2])):
        for param in optimizer.target.params():
            values = param.update_rule.state
            for name in values:
                values[name] = convert(values[name])
    values = None
    small = chainer.optimizers.Adam().setup(chainer.links.Linear(3, 3))
    step(small)
    for optimizer in (fortran, view, strided, small, trained(rule_of(OwnState)),
                      trained(rule_of(OwnSerialize)), trained(chainer.optimizers.SGD()),
                      chainer.optimizers.Adam().setup(chainer.links.Linear(3, 3))):
        copied(optimizer)
        assert not is_pending()
    for target in (None, 3, {'x': Wrapper(5), 'y': Wrapper(Wrapper(None))}):  # without a model
        assert not state.late_copies(SavedParts(target))._owners


class Swaps(chainer.optimizers.Adam):
    """Saves averages, which it swaps with others for that time."""

    def serialize(self, serializer):
        self.add(1)
        super().serialize(serializer)
        self.add(-1)

    def add(self, value):
        for param in self.target.params():
            param.update_rule.state['m'] += value


def test_an_optimizer_that_changes_states_to_save_them():
    optimizer = trained(Swaps())
    expected = {name: array + name.endswith('/m') for name, array in states(optimizer).items()}
    arrays, late = copied(optimizer)
    late.finish()
    check(arrays, expected)


def test_the_next_save_waits_for_the_copies_of_the_one_before():
    first, second = trained(), trained(chainer.optimizers.MomentumSGD())
    arrays, late, expected = begin(first)
    others, later, expected_others = begin(second)
    assert is_pending() and late._n_parts and later._n_parts
    step(first)
    step(second)
    late.finish()
    later.finish()
    check(arrays, expected)
    check(others, expected_others)


def test_threads_share_the_work(monkeypatch):
    monkeypatch.setattr(late_copies, '_PART', 1000)
    optimizer = trained()
    arrays, late, expected = begin(optimizer)
    assert late._n_parts == 2 * ROWS * COLUMNS // 250
    threads = [threading.Thread(target=late.finish) for _ in range(3)]
    for thread in threads:
        thread.start()
    late_copies.finish_copies()
    check(arrays, expected)
    for thread in threads:
        thread.join(seconds(60))
    late.check()


def test_an_interrupted_copy_fails_the_save(monkeypatch):
    optimizer = trained()
    _, late, _ = begin(optimizer)

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(np, 'copyto', interrupt)
        with pytest.raises(KeyboardInterrupt):
            step(optimizer)
    assert not is_pending()
    late.finish()  # of the thread, which must not wait forever
    with pytest.raises(RuntimeError, match='interrupted'):
        late.check()
    step(optimizer)


def test_a_forked_child_waits_for_no_thread():
    optimizer = trained()
    _, late, _ = begin(optimizer)
    late._threads[0] = -1  # a thread copies it
    if (pid := os.fork()) == 0:
        try:
            step(optimizer)
            os._exit(5 if is_pending() or runtime.get(late_copies._Pending).copies else 0)
        finally:
            os._exit(6)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    late._threads.clear()


@each_case('changes', [False, True])
def test_a_signal_handler_reads_states_in_the_middle_of_a_copy(monkeypatch, changes):
    optimizer = trained()
    arrays, late, expected = begin(optimizer)
    copyto, n_copied = np.copyto, []

    def interrupted(to, source):
        copyto(to, source)
        n_copied.append(None)
        if len(n_copied) == 1:  # handlers run after a call
            values = optimizer.target.W.update_rule.state
            assert (values['m'] == expected['/W/m']).all()
            if changes:
                for array in values.values():
                    array[...] = 7

    with monkeypatch.context() as patch:
        patch.setattr(np, 'copyto', interrupted)
        step(optimizer)
    late.finish()
    late.check()
    check(arrays, expected)
