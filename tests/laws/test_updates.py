"""Laws of updates in one pass over all parameters. Chainer updates them one after another."""

import contextlib
import dataclasses
import unittest.mock

import chainer
import numpy as np
import pytest
from equal_values import assert_same
from hypothesis import strategies as st
from laws.law import law, planted
from laws.programs import HOOKS
from update_cases import OPTIMIZERS, SPECIAL, UNUSUAL, update_each
from update_events import EVENTS

from chainer_compat.updates import block_updates, one_pass, optimizer_steps

pytestmark = pytest.mark.mpi_skip

BLOCK = 64
SHAPES = [(3, 4), (), (1,), (7,), (BLOCK + 3,), (2, BLOCK // 2), (4, 3), (4, 4), (3, 4), (7,)]
STEPS = 6


@dataclasses.dataclass(frozen=True)
class Updates:
    """Several updates with random gradients.

    Attributes:
        seed: The seed of random numbers.
        optimizer: The name of the optimizer.
        dtype: The dtype of the parameters.
        hooks: Names of hooks.
        events: The events before later steps.
        special: Whether some gradients are not finite or are very small.
        is_fp32: Whether float16 parameters are updated in float32.
    """

    seed: int
    optimizer: str
    dtype: str
    hooks: tuple[str, ...]
    events: tuple[str, ...]
    special: bool = False
    is_fp32: bool = False

    def start(self):
        random = np.random.RandomState(self.seed)
        model = chainer.Chain()
        with model.init_scope():
            for i, shape in enumerate(SHAPES):
                array = np.asarray(random.normal(size=shape), self.dtype)
                setattr(model, f'p{i}', chainer.Parameter(array))
        optimizer = OPTIMIZERS[self.optimizer]()
        if self.is_fp32:
            optimizer.use_fp32_update()
        optimizer.setup(model)
        for n, name in enumerate(self.hooks):
            optimizer.add_hook(HOOKS[name](), f'hook {n}')
        return optimizer

    def step(self, optimizer, n, event='nothing'):
        """Update once. Return whether the run can continue, and the state or the error."""
        random = np.random.RandomState([self.seed, n])
        params = [*optimizer.target.params()]
        for param in params:
            if param.array is None:
                continue
            param.grad = np.asarray(random.normal(size=param.shape), param.dtype)
            if self.special and n > 2 and param.size > 9:
                with np.errstate(over='ignore'):
                    param.grad.flat[:9] = SPECIAL
            param._loss_scale = optimizer._loss_scale
        usual = [param for param in params if type(param) is chainer.Parameter
                 and param.update_rule is not None and param.array is not None]
        if usual:
            p = usual[random.randint(len(usual))]
            same = [each for each in usual if each.size == p.size and each is not p] or [p]
            try:
                EVENTS[event](optimizer, p, same[random.randint(len(same))])
            except Exception:  # the event is impossible after the earlier ones
                return False, 'no event'
        if not all(map(is_divisible, usual)):
            return False, 'only Chainer finds it'
        try:
            with np.errstate(all='ignore'):
                optimizer.update()
        except Exception as error:
            return False, (type(error), str(error))
        return True, described(optimizer)

    def run(self):
        optimizer, found = self.start(), []
        for n in range(STEPS):
            goes_on, state = self.step(
                optimizer, n, self.events[n - 2] if 0 <= n - 2 < len(self.events) else 'nothing')
            found.append(state)
            if not goes_on:
                break
        return found


def is_divisible(param):
    """Return whether Chainer can divide a gradient by its loss scale."""
    return param._loss_scale is None or param.array is None or param._grad is None or (
        (param.array.dtype, param.array.shape) == (param._grad.dtype, param._grad.shape))


def described(optimizer):
    """Return everything that user code can read after an update."""
    found = {'t': optimizer.t, 'scale': optimizer._loss_scale,
             'counted': getattr(optimizer, 'counted', 0)}
    for name, param in sorted(optimizer.target.namedparams()):
        rule = param.update_rule
        found[name] = param.array
        found[f'{name} grad'] = None if param.array is None else param.grad
        if rule is not None:
            found[f'{name} t'] = rule.t
            found.update({f'{name} {key}': value for key, value in (rule.state or {}).items()})
            found[f'{name} copy'] = getattr(rule._fp32_param, 'array', None)
    return {name: np.array(value) if isinstance(value, np.ndarray) else value
            for name, value in found.items()}


def begin_of_chainer(optimizer):
    optimizer.reallocate_cleared_grads()
    optimizer.check_nan_in_grads()
    return False


@contextlib.contextmanager
def in_blocks(use_torch='never'):
    """Update in small blocks, with or without PyTorch."""
    with unittest.mock.patch.object(block_updates, 'BLOCK', BLOCK), \
            chainer.using_config('use_torch', use_torch), \
            chainer.using_config('fused_updates', True):
        yield


@contextlib.contextmanager
def one_by_one():
    """Update like Chainer: one parameter after another, with whole arrays."""
    with unittest.mock.patch.object(one_pass, 'update', update_each), \
            unittest.mock.patch.object(optimizer_steps, 'begin', begin_of_chainer), \
            chainer.using_config('use_torch', 'never'), \
            chainer.using_config('fused_updates', False):
        yield


def some(values, most):
    return st.lists(st.sampled_from([*values]), max_size=most).map(tuple)


def of_updates(optimizer=OPTIMIZERS, **fields):
    return st.builds(Updates, **{
        'seed': st.integers(0, 1000), 'optimizer': st.sampled_from([*optimizer]),
        'dtype': st.sampled_from('ffde'), 'hooks': st.just(()), 'events': some(EVENTS, 3),
        'special': st.booleans()} | fields)


def without_steps(key):
    """A fault: rules with different numbers of steps are updated together."""
    def changed(*args):
        found = key(*args)
        return found and (found[0], *found[2:])
    return changed


@law(of_updates(hooks=st.just(()) | some(HOOKS, 1), is_fp32=st.booleans()),
     planted(one_pass, '_key', without_steps), examples=8)
def test_one_pass(program):
    """Updates in one pass are bitwise identical to Chainer's updates of single parameters."""
    with one_by_one():
        expected = program.run()
    with in_blocks():
        found = program.run()
    assert_same(found, expected)


def stale_gradients():
    """A fault: PyTorch gets the gradients of the previous update if the shapes are the same."""
    pytest.importorskip('torch')
    from chainer_compat.pytorch.kernels import updates as kernels

    def change(original):
        def changed(grads, kept):
            if kept is not None and len(kept.gradients) == len(grads):
                return kept.gradient_tensors
            return original(grads, kept)
        return changed
    return planted(kernels, '_gradient_tensors', change)()


# Exclude cases in which rounding decides: infinities, and 'no beta', whose v is v + (g^2 - v).
@law(of_updates(OPTIMIZERS.keys() - UNUSUAL - {'no beta'}, dtype=st.sampled_from('fd'),
                special=st.just(False)), stale_gradients, examples=4)
def test_one_pass_by_pytorch(program):
    """Updates by PyTorch's kernels match Chainer's, except for rounding."""
    pytest.importorskip('torch')
    with one_by_one():
        expected = program.run()
    with in_blocks('auto'):
        found = program.run()
    tolerance = {'f': 1e-3, 'd': 1e-8}[program.dtype]
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if not isinstance(other, dict):
            assert one == other
            continue
        assert one.keys() == other.keys()
        for name, array in other.items():
            if not isinstance(array, np.ndarray):
                assert one[name] == array, name
                continue
            assert (one[name].dtype, one[name].shape) == (array.dtype, array.shape)
            np.testing.assert_allclose(one[name], array, tolerance, tolerance, err_msg=name)
