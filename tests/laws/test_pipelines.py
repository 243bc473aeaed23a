"""Laws of models on several ranks: pipelines, chain lists and functions match one process."""

import dataclasses
import itertools

import chainer
import chainer.functions as F
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from laws import stages
from laws.law import law, planted
from laws.stages import BLOCKS, assert_equal, generators, lossfun, programs, set_seeds, state

import chainermn
import chainermn.functions as mnf
from chainer_compat.graph.forward_state import ForwardState
from chainermn.functions.collective_communication import _Collective
from chainermn.functions.pseudo_connect import PseudoConnect
from chainermn.links._pipeline import micro_batches
from chainermn.links._pipeline.tied import Tied

pytestmark = [pytest.mark.mpi(min_size=2),
              pytest.mark.filterwarnings('ignore:A batch with no more than one sample')]


def train(comm, program, recompute):
    """Train with Pipeline. Return the losses and the state of this rank's stages by number."""
    set_seeds(program, comm.rank)
    found = stages.model(program, comm)
    hypothesis.assume(found)
    model, own = found
    shared = [own[n].bias for n in stages.tied(program, comm.size) & own.keys()]
    optimizer = chainer.optimizers.MomentumSGD(.05).setup(model)
    pipeline = chainermn.Pipeline(
        model, lossfun, program.n_micro_batches, program.schedule, recompute=recompute,
        tied=dict.fromkeys(['bias'] * len(shared), *shared))
    if program.scale:
        optimizer.loss_scaling(scale=program.scale)
    if program.threshold:
        optimizer.add_hook(pipeline.gradient_clipping(program.threshold))
    losses = {}
    for step in range(len(program.batches)):
        def loss(x, t, step=step):
            losses[step] = pipeline(x, t)
            return losses[step]
        optimizer.update(loss, *program.batch(step))
    with chainer.no_backprop_mode(), chainer.using_config('train', False):
        losses['evaluation'] = pipeline(*program.batch(0))
    return {step: loss.array for step, loss in losses.items()}, {
        n: state(each) for n, each in own.items()}


@law(programs([*BLOCKS], 'fd'), planted(ForwardState, 'again', lambda again: lambda self: self),
     examples=2)
def test_recomputation(comm, program):
    """``Pipeline(recompute=True)`` does not change losses, gradients, states or generators."""
    expected, expected_states = train(comm, program, False)
    expected |= generators()
    found, found_states = train(comm, program, True)
    assert_equal(found | generators(), expected)
    for n, each in expected_states.items():
        assert_equal(found_states[n], each)


def one_process(program, size):
    """Train like :func:`train`, with all stages in one process."""
    set_seeds(program, 0)
    parts, losses, tied = stages.stages(program, size), {}, stages.tied(program, size)
    links = chainer.ChainList(*parts.values())
    optimizer = chainer.optimizers.MomentumSGD(.05).setup(links)
    first = min(tied, key=lambda n: program.parts[n].rank % size, default=None)
    for n in tied:
        parts[n].bias.array[...] = parts[first].bias.array

    def compute(step):
        """Compute the loss in micro-batches."""
        n_examples = program.batches[step]
        n = min(program.n_micro_batches, n_examples)
        ends, total = [n_examples * k // n for k in range(n + 1)], 0.
        for begin, end in itertools.pairwise(ends):
            x, t = (each[begin:end] for each in program.batch(step))
            loss = lossfun(stages.run(program, parts, x), t) * ((end - begin) / n_examples)
            if chainer.config.enable_backprop:
                loss.backward()
            total += loss.array
        return total

    for step in range(len(program.batches)):
        links.cleargrads()
        losses[step] = compute(step)
        total = sum(parts[n].bias.grad for n in tied)
        counted = {id(param): param for n, part in parts.items() for param in part.params()
                   if param.grad is not None and not (n in tied and n and param is part.bias)}
        for n in tied:
            parts[n].bias.grad = total.copy()
        norm = np.sqrt(sum((param.grad ** 2).sum() for param in counted.values()))
        if program.threshold and norm > program.threshold:
            for param in {id(param): param for param in links.params()}.values():
                if param.grad is not None:
                    # Do not change it in place: the gradients of W and V in W + V are one array.
                    param.grad = param.grad * (program.threshold / norm)
        optimizer.update()
    with chainer.no_backprop_mode(), chainer.using_config('train', False):
        losses['evaluation'] = compute(0)
    return losses, {n: state(part) for n, part in parts.items()}


@law(programs(), planted(Tied, 'add', lambda add: lambda self, params, grads: None),
     examples=3)
def test_pipeline(comm, program):
    """``Pipeline`` matches one process that runs one micro-batch at a time."""
    found, found_states = train(comm, program, program.recompute)
    expected, expected_states = one_process(program, comm.size)
    assert_equal(found, expected, 1e-8)
    for n, each in found_states.items():
        assert_equal(each, expected_states[n], 1e-8)


@law(programs(), planted(PseudoConnect, 'backward', lambda backward: lambda self, indexes, gys: (
    backward(self, indexes, (gys[0], *[None] * (len(gys) - 1))))), examples=4)
def test_list(comm, program):
    """``MultiNodeChainList``: outputs, gradients and states of several calls match one process."""
    found = stages.model(program, comm)
    hypothesis.assume(found)
    model, own = found
    parts = stages.stages(program, comm.size)
    last = len(parts) - 1
    for each in model, *parts.values():
        each.cleargrads()
    ys, expected = {}, {}
    for step in range(len(program.batches)):
        x, _ = program.batch(step)
        ys[step] = model(x)
        expected[step] = stages.run(program, parts, x)
    order = [*ys][::-1 if program.recompute else 1]
    for step in order if own else ():
        (F.sum(ys[step] ** 2) if last in own else ys[step]).backward()
    sum(F.sum(y ** 2) for y in expected.values()).backward()
    if last in own:
        assert_equal({step: y.array for step, y in ys.items()},
                     {step: y.array for step, y in expected.items()}, 1e-8)
    for n, each in own.items():
        assert_equal(state(each), state(parts[n]), 1e-8)


# --- functions ------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Calls:
    """Calls of functions one after another: names, ranks, and which outputs the loss uses."""

    dtype: str
    calls: tuple[tuple[str, int, int, tuple[bool, ...]], ...]


#: The definition of each function: the outputs of each rank, given the inputs of all ranks.
DEFINITIONS = {
    'allgather': lambda xs, root: [[x[0] for x in xs]] * len(xs),
    'allreduce': lambda xs, root: [[sum(x[0] for x in xs)]] * len(xs),
    'alltoall': lambda xs, root: [[x[rank] for x in xs] for rank in range(len(xs))],
    'reduce_scatter': lambda xs, root: [[sum(x[rank] for x in xs)] for rank in range(len(xs))],
    'bcast': lambda xs, root: [[xs[root][0]]] * len(xs),
    'gather': lambda xs, root: [[x[0] for x in xs] if rank == root else []
                                for rank in range(len(xs))],
    'scatter': lambda xs, root: [[xs[root][rank]] for rank in range(len(xs))],
}
TAKES_ONE_PER_RANK = ('alltoall', 'reduce_scatter', 'scatter')
calls = st.builds(Calls, st.sampled_from('efd'), st.lists(st.tuples(
    st.sampled_from([*DEFINITIONS, 'send', 'send', 'send tuple']), st.integers(0, 5),
    st.integers(1, 5), st.lists(st.booleans(), min_size=1, max_size=3).map(tuple)),
    min_size=1, max_size=6).map(tuple))


class Rank:
    """The variables of a rank, in its own process or in one process with the others."""

    def __init__(self, rank, dtype):
        self.x = chainer.Variable(np.random.RandomState(rank).randn(2, 3).astype(dtype))
        self.h = F.arctan(self.x)  # unlike tanh, its gradient does not cancel in float16

    def inputs(self, name, size):
        return [self.h * (n + 1) for n in range(size if name in TAKES_ONE_PER_RANK else 1)]

    def use(self, ys, used):
        for n, y in enumerate(ys):
            if used[n % len(used)]:
                self.h = F.arctan(self.h + y * (n + 1))


def call(comm, own, name, root, other, used):
    """Call a function on this rank."""
    root %= comm.size
    if name.startswith('send'):
        dest = (root + 1 + other % (comm.size - 1)) % comm.size
        if comm.rank == root:
            delegate = mnf.send((own.h, own.x) if 'tuple' in name else own.h, comm, dest, other)
            own.h, = mnf.pseudo_connect(delegate, own.h)
        elif comm.rank == dest:
            ys = mnf.recv(comm, root, own.h, other, force_tuple=True)
            own.use(ys, (True, *used))
        return
    xs = own.inputs(name, comm.size)
    args = (root,) if name in ('bcast', 'gather', 'scatter') else ()
    ys = getattr(mnf, name)(comm, xs if name in TAKES_ONE_PER_RANK else xs[0], *args)
    ys = ys if isinstance(ys, tuple) else (ys,)
    own.h, = mnf.pseudo_connect(ys[0], own.h)  # all ranks run backward
    if name != 'gather' or comm.rank == root:
        own.use(ys, used)


def call_in_one_process(ranks, name, root, other, used):
    root %= len(ranks)
    if name.startswith('send'):
        dest = (root + 1 + other % (len(ranks) - 1)) % len(ranks)
        one = ranks[root]
        ranks[dest].use([one.h, one.x][:2 if 'tuple' in name else 1], (True, *used))
        return
    outputs = DEFINITIONS[name]([each.inputs(name, len(ranks)) for each in ranks], root)
    for each, ys in zip(ranks, outputs, strict=True):
        each.use(ys, used)


def without_missing(f):
    def changed(self, gys):
        return f(self, [*gys[:-1], None] if len(gys) > 1 else gys)
    return changed


@law(calls, planted(_Collective, '_zeros_for_missing', without_missing), examples=12)
def test_functions(comm, program):
    """Values and gradients of ``chainermn.functions`` match a single-process model."""
    own = Rank(comm.rank, program.dtype)
    ranks = [Rank(rank, 'd') for rank in range(comm.size)]
    for each in program.calls:
        call(comm, own, *each)
        call_in_one_process(ranks, *each)
    F.sum(own.h * (comm.rank + 1)).backward()
    sum(F.sum(each.h * (rank + 1)) for rank, each in enumerate(ranks)).backward()
    expected = ranks[comm.rank]
    assert own.h.dtype == own.x.grad.dtype == program.dtype
    assert_equal({'h': own.h.array, 'gradient': own.x.grad},
                 {'h': expected.h.array, 'gradient': expected.x.grad},
                 {'e': 5e-2, 'f': 1e-4, 'd': 1e-10}[program.dtype])


# --- wrong calls ----------------------------------------------------------------------------------

@law(st.tuples(st.sampled_from(['examples', 'options', 'arguments', 'alltoall', 'scatter']),
               st.integers(0, 5), st.integers(1, 9), st.integers(0, 99)),
     planted(micro_batches, 'count', lambda count: lambda args: 4))
def test_wrong_calls(comm, program):
    """A wrong call on one rank raises the same error on all ranks; the next call works."""
    kind, rank, n, seed = program
    is_wrong = comm.rank == rank % comm.size
    x, t = np.random.RandomState(seed).randn(2, n, stages.WIDTH)
    links = chainer.ChainList(*(
        stages.BLOCKS['Linear'](stages.WIDTH, (seed, k), 'd') for k in range(comm.size)))
    model = chainermn.MultiNodeChainList(comm)
    model.add_link(links[comm.rank], None if comm.rank == 0 else comm.rank - 1,
                   None if comm.rank == comm.size - 1 else comm.rank + 1)
    function = None if kind not in ('alltoall', 'scatter') else getattr(mnf, kind)
    error = None
    try:
        if function:
            extra = is_wrong if kind == 'alltoall' else comm.rank == 0
            function(comm, [np.ones(n)] * (comm.size + extra))
        elif kind == 'examples':
            chainermn.Pipeline(model, lossfun)(*([x[:0], t[:0]] if comm.rank == 0 else [x, t]))
        elif kind == 'options':
            chainermn.Pipeline(model, lossfun, 3 if is_wrong else 2)(x, t)
        else:
            chainermn.Pipeline(model, lossfun)(*[x, t][:1 if comm.rank == 0 else 2])
    except ValueError as caught:
        error = str(caught)
    texts = comm.allgather_obj(error)
    links.cleargrads()
    loss = chainermn.Pipeline(model, lossfun, n + 3)(x, t)
    loss.backward()
    found = {path: param.grad.copy() for path, param in links[comm.rank].namedparams()}
    links.cleargrads()
    expected = lossfun(chainer.Sequential(*links)(x), t)
    expected.backward()
    assert error and len(set(texts)) == 1
    assert_equal(found | {'loss': loss.array}, {
        path: param.grad for path, param in links[comm.rank].namedparams()
    } | {'loss': expected.array}, 1e-8)
