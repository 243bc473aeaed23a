"""A job that resumes on another number of ranks uses the rest of the epoch.

The reference: the samples that the old job has used, counted, and the rest of the dataset.
"""
import collections
import itertools
import random
import traceback
import warnings

import chainer
import numpy as np
import pytest
from chainer import iterators
from each_case import each_case
from killed_jobs import make_iterator, make_saver, new_folder, run_loop

import chainermn


def run(group, folder, case, end):
    """Train from the last checkpoint to an iteration and save it, as if the job was killed then.

    Returns:
        The samples that this rank used, in order, and the epoch.
    """
    np.random.seed(group.rank)
    used = []
    iterator = make_iterator(group, range(case['n']), case)
    model = chainer.links.Linear(1, 1, initialW=1)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(), group, n_accumulations=case.get('n_accumulations', 1)
    ).setup(model)
    saver = make_saver(group, folder, case['how'])
    if case['how'] == 'dictionary':
        def step(batch):
            used.extend(batch)
            optimizer.update(lambda: chainer.functions.sum(model(np.ones((1, 1), 'f'))))

        target = {'model': model, 'optimizer': optimizer, 'iterator': iterator}
        run_loop(saver, target, step, end, interval=end)
        iterator.finalize()
        return used, iterator.epoch
    second = iterators.SerialIterator(range(case['n']), 1, shuffle=False)

    def convert(batch, device):
        used.extend(batch)
        return np.ones((1, 1), 'f') * len(next(second))

    updater = chainer.training.StandardUpdater(
        {'second': second, 'main': iterator}, optimizer, converter=convert,
        loss_func=lambda x: chainer.functions.sum(model(x)))
    trainer = chainer.training.Trainer(updater, (end, 'iteration'), out=folder)
    trainer.extend(saver, trigger=(end, 'iteration'))
    if case['how'] == 'checkpointer':
        saver.maybe_load(trainer, optimizer)
    trainer.run()
    assert next(second) == [end % case['n']]
    return used, iterator.epoch


def on_ranks(comm, size, function):
    """Call a function on the first ranks; return their results on all ranks."""
    group, result, error = comm.split(int(comm.rank >= size), comm.rank), None, None
    if comm.rank < size:
        with warnings.catch_warnings():
            warnings.filterwarnings('ignore', 'iteration .* (was saved by|is between the updates)')
            try:
                result = function(group)
            except Exception:
                error = traceback.format_exc()
    results, errors = zip(*comm.allgather_obj((result, error)), strict=True)
    assert not any(errors), next(filter(None, errors))
    return results[:size]


def shard(n, size, rank, case):
    """The samples of a rank, as the docstring of scatter_dataset defines them."""
    if case['data'] == 'scattered':
        return list(range(n * rank // size, n * rank // size + -(-n // size)))
    return list(range(n))[n // size * rank + min(rank, n % size):][:n // size + (rank < n % size)]


def check(comm, folder, case):
    """Resume on each further number of ranks, and compare the samples with the definition."""
    n, batch, data = case['n'], case['batch'], case['data']
    used = []  # samples of this epoch; for MultiNodeOrderSampler
    position, length, epoch, iteration = 0, n, 0, 0  # of rank 0
    for i, (size, steps) in enumerate(zip(case['sizes'], case['steps'], strict=True)):
        is_scattered = data in ('scattered', 'uneven')
        orders = [shard(n, size, rank, case) if is_scattered else list(range(n))
                  for rank in range(size)]
        if data == 'sampler':
            if i and len(used) < size:
                used = []  # as its docstring says
            length = -(-n // size)
            rests = [-(-(n - len(used)) // size)] * size
        else:
            rests = [len(order) - position * len(order) // length for order in orders]
            position, length = position * len(orders[0]) // length, len(orders[0])
        if steps is None:
            steps = -(-rests[0] // batch)  # the rest of the epoch
        iteration += steps
        found = on_ranks(comm, size, lambda group, end=iteration: run(group, folder, case, end))
        for (stream, _), rest, order in zip(found, rests, orders, strict=True):
            assert len(stream) == steps * batch
            mine = stream[:rest]
            if data != 'sampler' and not case['shuffle']:
                assert mine == order[len(order) - rest:][:len(mine)]
            assert len({*mine}) == len(mine) and {*mine} <= {*order}
        left = steps * batch - rests[0]
        if left < 0:
            position += steps * batch
            used += itertools.chain(*(stream for stream, _ in found))
        else:
            used += itertools.chain(*(stream[:rests[0]] for stream, _ in found))
            counts = collections.Counter(used)
            if data == 'sampler':
                assert {*counts} == {*range(n)} and counts.total() - n < size, counts
            epoch += 1 + left // length
            position = left % length
            used = [*itertools.chain(*(stream[len(stream) - position:] for stream, _ in found))]
        assert found[0][1] == epoch


@each_case('data, shuffle, steps', [
    ('sampler', True, 17), ('uneven', True, 3)])
def test_one_snapshot_for_all_ranks(comm, folder, data, shuffle, steps):
    """Each rank has its own samples, although all load the snapshot of one."""
    check(comm, new_folder(comm, folder), {
        'kind': 'serial', 'n': 8 * comm.size + 1, 'batch': 1, 'data': data, 'shuffle': shuffle,
        'how': 'snapshot', 'sizes': [comm.size] * 3, 'steps': [steps, 2, None]})


def random_case(seed, size):
    choose = random.Random(seed).choice
    data = choose(['scattered', 'uneven', 'sampler', 'multi-node', 'synchronized'])
    sizes = [choose(range(1, size + 1)) for _ in range(choose([2, 3, 4]))]
    if data == 'uneven':  # on the same number of ranks, they differ by the steps that they made
        sizes = [number for number, _ in itertools.groupby(sizes)]
    batch = choose([1, 2, 3, 5])
    return dict(
        data=data, shuffle=data == 'synchronized' or choose([True, False]), batch=batch,
        how=choose(['checkpointer', 'dictionary', 'snapshot']), n=choose([7, 24, 30, 41]),
        kind=choose(['serial', 'serial', 'thread', 'process']),
        n_accumulations=choose([1, 1, 2]), sizes=sizes,
        steps=[choose([1, 2, 3, 5, 9]) for _ in sizes[1:]] + [None])


@pytest.mark.slow
@pytest.mark.every_size
@pytest.mark.limit(900)
@each_case('seed', lambda config: range(100 if config.getoption('full') else 10))
def test_random_cases(comm, folder, seed):
    check(comm, new_folder(comm, folder), random_case(seed, comm.size))
