"""Random programs that are killed twice, and resume, end like uninterrupted ones: bit by bit."""
import contextlib
import io
import json
import random
import warnings

import chainer
import numpy as np
import pytest
from chainer import iterators
from chainer.training import extensions, triggers
from each_case import each_case
from killed_jobs import ITERATORS, make_iterator, make_saver, new_folder, run_loop

import chainermn
from chainermn.extensions import (
    AllreducePersistent,
    LinearScaling,
    ObservationAggregator,
    create_multi_node_report,
)

LENGTH = 14  # iterations


TRIGGERS = [
    lambda: (1, 'iteration'), lambda: (2, 'iteration'), lambda: (3, 'iteration'),
    lambda: (1, 'epoch'), lambda: (0.4, 'epoch'),
    lambda: triggers.ManualScheduleTrigger([2, 5, 6, 11], 'iteration'),
    lambda: triggers.MinValueTrigger('main/loss', (2, 'iteration')),
]


def rate_of(model):
    """Name of the learning rate."""
    return 'alpha' if hasattr(model.linear.W.update_rule.hyperparam, 'alpha') else 'lr'


def evaluator(comm, model, trigger):
    data = np.linspace(0, 1, 9, dtype='f').reshape(3, 3)
    return chainermn.create_multi_node_evaluator(extensions.Evaluator(
        iterators.SerialIterator(data, 2, repeat=False, shuffle=False), model), comm)


EXTENSIONS = {
    'log': lambda comm, model, trigger: extensions.LogReport(
        trigger=trigger, filename=f'log{comm.rank}'),
    'multi-node log': lambda comm, model, trigger: create_multi_node_report(
        extensions.LogReport(trigger=trigger), comm),
    'print': lambda comm, model, trigger: extensions.PrintReport(
        ['main/loss'], create_multi_node_report(
            extensions.LogReport(trigger=trigger, log_name=None), comm), out=io.StringIO()),
    'shift': lambda comm, model, trigger: extensions.ExponentialShift(rate_of(model), .9),
    'warm-up': lambda comm, model, trigger: extensions.WarmupShift(rate_of(model), .01, 6, .1),
    'linear': lambda comm, model, trigger: extensions.LinearShift(
        rate_of(model), (.1, .01), (2, 9)),
    'scaling': lambda comm, model, trigger: LinearScaling(
        comm, warmup_epochs=1, attr=rate_of(model)),
    'average': lambda comm, model, trigger: extensions.MicroAverage(
        'main/loss', 'sum', 'average', trigger),
    'statistics': lambda comm, model, trigger: extensions.ParameterStatistics(
        model.linear, {'mean': np.mean}, trigger=trigger),
    'aggregator': lambda comm, model, trigger: ObservationAggregator(
        comm, 'main/loss', 'all/loss', comm_trigger=trigger),
    'persistent': lambda comm, model, trigger: AllreducePersistent(model, comm),
    'evaluator': evaluator,
    'best': lambda comm, model, trigger: extensions.snapshot_object(model, f'best{comm.rank}'),
}


def random_case(seed):
    """Return a program: names and numbers that are the same on all ranks."""
    chance = random.Random(seed)
    choose = chance.choice
    schedules = ['shift', 'warm-up', 'linear', 'scaling']  # of one learning rate
    names = [choose(schedules), *(name for name in EXTENSIONS if name not in schedules)]
    how = choose(['checkpointer', 'checkpointer', 'dictionary', 'snapshot'])
    # A snapshot has neither random numbers nor the data order of each rank.
    data = choose(['scattered', 'sampler'] if how == 'snapshot' else [
        'scattered', 'uneven', 'sampler', 'multi-node', 'synchronized'])
    kind = choose(list(ITERATORS))
    return dict(
        how=how, data=data, kind=kind, batch=choose([1, 2, 3, 4]),
        shuffle=data == 'synchronized' or data == 'sampler' or (
            how != 'snapshot' and choose([True, False])),
        # The thread of MultiprocessIterator draws random numbers at any time.
        dropout=0 if how == 'snapshot' or kind == 'process' else .3,
        optimizer=choose(['MomentumSGD', 'Adam', 'SGD']),
        shard_states=how != 'snapshot' and choose([True, False]),
        added=[(name, choose(range(len(TRIGGERS))))
               for name in chance.sample(names, choose([3, 6, len(names)]))],
        ends=sorted(chance.sample(range(2, LENGTH), 2)), interval=choose([1, 2, 3]),
        load_after=[choose(range(14)) for _ in range(3)], overlap=choose([False, 'always']),
        compression=choose([None, '2bit']) if how != 'snapshot' else None)


class Model(chainer.Chain):
    def __init__(self, dropout):
        super().__init__()
        with self.init_scope():
            self.linear = chainer.links.Linear(3, 4)
            self.bn = chainer.links.BatchNormalization(4)
        self.linear.name = 'linear'
        self.dropout = dropout

    def forward(self, x):
        h = self.linear(x)
        if self.dropout:  # with a ratio of 0 it would draw numbers, too
            h = chainer.functions.dropout(h, self.dropout)
        h = self.bn(h)
        loss = chainer.functions.mean((h - 1) ** 2)
        chainer.report({'loss': loss}, self)
        return loss


def run(comm, folder, case, end, load_after):
    """Train from the last save until an iteration; return all that is left then, by name."""
    np.random.seed(comm.rank)
    n = 7 * comm.size - (case['data'] == 'uneven')
    examples = np.random.RandomState(5).normal(0, 1, (n, 3)).astype('f')
    iterator, model = make_iterator(comm, examples, case), Model(case['dropout'])
    optimizer = chainermn.create_multi_node_optimizer(
        getattr(chainer.optimizers, case['optimizer'])(), comm,
        shard_states=case['shard_states'], overlap=case['overlap'],
        compression=case['compression'],
        # With uneven data, schedules by epoch change the rate at different iterations.
        compare_settings=case['data'] != 'uneven').setup(model)
    saver = make_saver(comm, folder, case['how'])
    if case['how'] == 'dictionary':
        target = {'optimizer': optimizer, 'model': model, 'iterator': iterator}
        run_loop(saver, target, lambda batch: optimizer.update(
            model, chainer.dataset.concat_examples(batch)), end, case['interval'])
    else:
        target = trainer = chainer.training.Trainer(
            chainer.training.StandardUpdater(iterator, optimizer), (end, 'iteration'), out=folder)
        add_all(comm, case, trainer, model, saver, optimizer, load_after)
        trainer.run()
    left = state_of(target)
    if case['dropout']:
        left['random'] = np.random.get_state()[1].tobytes()
    iterator.finalize()
    return left


def add_all(comm, case, trainer, model, saver, optimizer, load_after):
    trainer.extend(saver, trigger=(case['interval'], 'iteration'))
    trainer.extend(lambda trainer: chainer.report({
        'count': trainer.updater.iteration, 'sum': 1.5}), name='observe', priority=1000,
        trigger=(1, 'iteration'))
    for i, (name, trigger) in enumerate([*case['added'], (None, None)]):
        if case['how'] == 'checkpointer' and i == min(load_after, len(case['added'])):
            saver.maybe_load(trainer, optimizer)
        if name is None:
            continue
        options = {}
        if name in ('shift', 'warm-up', 'linear', 'evaluator', 'persistent', 'best'):
            options['trigger'] = TRIGGERS[trigger if name in ('shift', 'best') else 1]()
        if name in ('persistent', 'evaluator'):  # these communicate
            options['trigger'] = TRIGGERS[trigger % 3]()
        if name == 'best' or trigger is None:
            options['trigger'] = TRIGGERS[trigger]()
        inner = TRIGGERS[trigger % 3]() if name in (
            'multi-node log', 'print', 'aggregator') else TRIGGERS[trigger]()
        trainer.extend(EXTENSIONS[name](comm, model, inner), name=name, **options)


def state_of(target):
    """All that the objects serialize, but no times."""
    serializer = chainer.serializers.DictionarySerializer()
    parts = target.items() if isinstance(target, dict) else [('', target)]
    for name, part in parts:
        part.serialize(serializer[name] if name else serializer)
    left = {}
    for key, value in serializer.target.items():
        if key.endswith('/_log'):
            value = np.asarray(json.dumps([
                {name: entry[name] for name in entry if name != 'elapsed_time'}
                for entry in json.loads(str(value))]))
        if not key.endswith(('elapsed_time', 'next_orders')):
            left[key] = f'{value.dtype} {value.shape} {value.tolist()!r}'
    return left


def check(comm, folder, case):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', PendingDeprecationWarning)
        warnings.filterwarnings('ignore', 'A batch with no more than one sample')
        expected = run(comm, new_folder(comm, folder), case, LENGTH, 99)
        resumed, left = new_folder(comm, folder), {}
        for end, load_after in zip([*case['ends'], LENGTH], case['load_after'], strict=True):
            left = run(comm, resumed, case, end, load_after)
    different = {key: (expected.get(key), left.get(key)) for key in {*expected, *left}
                 if expected.get(key) != left.get(key)}
    if case['how'] == 'snapshot':  # it has the logs and the batch normalization of one rank
        different = {key: values for key, values in different.items()
                     if key.startswith('updater/') and '/bn/avg' not in key}
    assert not different, '\n'.join(
        f'{key}\n  {before}\n  {after}' for key, (before, after) in sorted(different.items())
    )[:3000]


@pytest.mark.slow
@pytest.mark.limit(120)
@each_case('seed', range(4))
def test_some_programs(comm, folder, seed):
    check(comm, folder, random_case(seed))


@pytest.mark.full
@pytest.mark.limit(1200)
@each_case('seed', range(4, 204))
def test_many_programs(comm, folder, seed):
    with contextlib.redirect_stderr(io.StringIO()):
        check(comm, folder, random_case(seed))
