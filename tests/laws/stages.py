"""Random models with stages on several ranks, and the same models in one process."""

import collections
import dataclasses
import random

import chainer
import chainer.functions as F
import numpy as np
from hypothesis import strategies as st
from laws.blocks import BLOCKS, BY_ROW, Memory

import chainermn

WIDTH = 4


class Reset(Memory):
    """A link that resets its state at the beginning of each call."""

    def forward(self, h):
        self.cell.reset_state()
        return self.cell(self.cell(h))


BLOCKS = {name: block for name, block in BLOCKS.items() if block is not Memory} | {'Reset': Reset}
#: Blocks whose results do not depend on random numbers.
REPEATABLE = [name for name in BLOCKS if name not in ('Dropout', 'Noise', 'Depth')]
OUTPUTS = {
    'one': lambda y: y,
    'tuple of one': lambda y: (y,),
    'list': lambda y: [y, F.sin(y)],
    'two': lambda y: (y, 2 * y),
    'integers': lambda y: (y, (y.array > 0).astype('i')),
    'no gradient': lambda y: (y.array, y),
}


@dataclasses.dataclass(frozen=True)
class Part:
    """A stage: its blocks, the form of its output, the stages that send its inputs, its rank."""

    blocks: tuple[str, ...]
    output: str
    sources: tuple[int, ...]
    rank: int


@dataclasses.dataclass(frozen=True)
class Program:
    """The options of a training run of a model with several stages. The last one has the output."""

    seed: int
    dtype: str
    parts: tuple[Part, ...]
    shared: tuple[int, int]
    tied: bool
    batches: tuple[int, ...]
    n_micro_batches: int
    schedule: str
    scale: float | None
    threshold: float | None
    recompute: bool

    def batch(self, step):
        draw = np.random.RandomState([self.seed, step])
        return [draw.randn(self.batches[step], WIDTH).astype(self.dtype) for _ in range(2)]


class Stage(chainer.Chain):
    """Sums its inputs, adds a bias, which may be tied, and calls its blocks."""

    def __init__(self, program, n, blocks=None):
        super().__init__()
        part = program.parts[n]
        self.outputs = OUTPUTS[part.output if n < len(program.parts) - 1 else 'one']
        np.random.seed([program.seed, n])  # for SpectralNormalization
        with self.init_scope():
            self.bias = chainer.Parameter(np.full(WIDTH, n / 9, program.dtype))
            self.blocks = chainer.ChainList(*(
                BLOCKS[name](WIDTH, (program.seed, n, k), program.dtype)
                for k, name in enumerate(part.blocks))) if blocks is None else blocks

    def forward(self, *xs):
        flat = [F.cast(x, self.bias.dtype) for y in xs
                for x in (y if isinstance(y, (tuple, list)) else (y,))]
        h = sum((x * (n + 1) for n, x in enumerate(flat[1:], 1)), flat[0])
        h = F.sin(h + F.broadcast_to(self.bias, h.shape))
        for block in self.blocks:
            h = block(h)
        return self.outputs(h)


def stages(program, size, rank=None):
    """Return the stages of one rank by number; of all ranks if ``rank`` is ``None``."""
    found, (one, other) = {}, program.shared
    ranks = [part.rank % size for part in program.parts]
    for n in range(len(ranks)):
        if rank in (None, ranks[n]):
            is_shared = n == other and one < other and ranks[one] == ranks[n]
            found[n] = Stage(program, n, found[one].blocks if is_shared else None)
    return found


def model(program, comm):
    """Return the MultiNodeChainList of this rank and its stages, or ``None`` if it cannot run.

    Messages between two ranks arrive in the order in which they are sent, and ``send`` may wait
    until the message is received.
    """
    ranks = [part.rank % comm.size for part in program.parts]
    own, calls = stages(program, comm.size, comm.rank), collections.defaultdict(list)
    chain = chainermn.MultiNodeChainList(comm)
    for n, part in enumerate(program.parts):
        dests = [m for m, other in enumerate(program.parts) for s in other.sources if s == n]
        calls[ranks[n]] += [(ranks[s], (s, n), False) for s in part.sources]
        calls[ranks[n]] += [(ranks[m], (n, m), True) for m in dests]
        if n in own:
            chain.add_link(own[n], [ranks[s] for s in part.sources] or None,
                           None if n == len(ranks) - 1 else [ranks[m] for m in dests])
    return (chain, own) if _can_run(calls) else None


def _can_run(calls):
    """Return whether the messages (peer, edge, is_sent) of all ranks match without a deadlock."""
    own = collections.defaultdict(collections.deque)
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, found in calls.items():
            if not found:
                continue
            peer, edge, is_sent = found[0]
            if peer == rank:
                if is_sent:
                    own[rank].append(edge)
                elif not own[rank] or own[rank].popleft() != edge:
                    return False
            elif calls[peer] and is_sent and calls[peer][0] == (rank, edge, False):
                calls[peer].pop(0)
            else:
                continue
            found.pop(0)
            is_moving = True
    return not any(calls.values())


def run(program, parts, x):
    """Return the output of a model in one process."""
    values = []
    for n, part in enumerate(program.parts):
        values.append(parts[n](*(values[s] for s in part.sources) if part.sources else (x,)))
    return values[-1]


def lossfun(y, t):
    return F.sum((y - t) ** 2) / max(1, y.size)


def tied(program, size):
    """Return the numbers of the stages that share a bias although they are on different ranks."""
    last = len(program.parts) - 1
    return {0, last} if program.tied and (
        program.parts[0].rank - program.parts[last].rank) % size else set()


def set_seeds(program, rank):
    np.random.seed([program.seed, rank])
    random.seed(program.seed + rank)


def generators():
    """Draw numbers that depend on the states of the generators."""
    return {'numpy': np.random.random(), 'random': random.random()}


def state(link):
    """Return parameters, gradients and all numbers and arrays in attributes, by name.

    Skip Variables, such as the state of an LSTM, because they belong to one micro-batch.
    """
    found = {}
    for path, each in sorted(link.namedlinks()):
        for name, value in sorted(vars(each).items()):
            array = value.array if isinstance(value, chainer.Parameter) else value
            # Chainer's links keep _prev_avg_mean only for F.forget.
            if isinstance(array, (int, float, np.ndarray)) and not name.startswith('_prev_'):
                found[f'{path}/{name}'] = np.array(array)
            if isinstance(value, chainer.Parameter) and value.grad is not None:
                found[f'{path}/{name} grad'] = value.grad.copy()
    return found


def assert_equal(found, expected, tolerance=0.):
    """Assert that arrays by name are equal within a tolerance relative to the largest element."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, tolerance, tolerance * max(
            1, np.abs(array).max(initial=0)), err_msg=name)


@st.composite
def programs(draw, blocks=REPEATABLE, dtypes='d', is_chain=False):
    """Draw a program."""
    def some(values, least, most):
        return tuple(draw(st.lists(st.sampled_from(values), min_size=least, max_size=most)))

    n, sources = draw(st.integers(2, 6)), []
    for k in range(n):
        own = (k - 1,) if is_chain or draw(st.booleans()) else some(range(-1, k), 1, 3)
        sources.append(tuple(s for s in own if s >= 0))
    unused = {*range(n - 1)} - {s for own in sources for s in own}
    sources[-1] = (*sources[-1], *sorted(unused))
    parts = tuple(Part(some(blocks, 0, 2), draw(st.sampled_from([*OUTPUTS])), own,
                       draw(st.integers(0, 5))) for own in sources)
    shared = draw(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)))
    if not {*parts[shared[0]].blocks} <= BY_ROW.keys():
        shared = 0, 0
    return Program(
        draw(st.integers(0, 10**6)), draw(st.sampled_from(dtypes)), parts, shared,
        draw(st.booleans()), some([5, 1, 2, 8], 1, 3), draw(st.integers(1, 5)),
        draw(st.sampled_from(['1f1b', 'gpipe'])), draw(st.sampled_from([None, 64.])),
        draw(st.sampled_from([None, .1])), draw(st.booleans()))
