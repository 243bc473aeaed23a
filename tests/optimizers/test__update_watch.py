"""Only scripts that update the actual optimizer directly get a warning."""
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.mpi_skip

TESTS = str(pathlib.Path(__file__).parents[1])
START = '''
import sys, chainer, numpy as np, chainermn
comm = chainermn.create_communicator('naive')
model = chainer.links.Linear(2, 1)
actual = chainer.optimizers.SGD()
optimizer = chainermn.create_multi_node_optimizer(actual, comm).setup(model)

def loss():
    return chainer.functions.sum(model(np.ones((1, 2), np.float32)))

def main():
    model = chainer.links.Linear(2, 1)
    actual = chainer.optimizers.SGD().setup(model)
    optimizer = chainermn.create_multi_node_optimizer(actual, comm)
    for _ in range(3):
        actual.update(lambda: chainer.functions.sum(model(np.ones((1, 2), np.float32))))
'''

WRONG = {
    'from the beginning': '''
for step in range(5):
    actual.update(loss)
    print(f'step {step}' * (comm.rank == 0), file=sys.stderr, flush=True)
''',
    'in a function': 'main()',
    'after training': '''
for _ in range(4): optimizer.update(loss)
for _ in range(3): actual.update(loss)
''',
    'overlapped training': '''
optimizer = chainermn.create_multi_node_optimizer(
    chainer.optimizers.SGD(), comm, overlap='always').setup(model)
for _ in range(4): optimizer.update(loss)
for _ in range(4): optimizer.actual_optimizer.update(loss)
''',
    'one model of a GAN': '''
other = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(
    chainer.links.Linear(2, 1))
for _ in range(4):
    other.update(lambda: chainer.functions.sum(other.target(np.ones((1, 2), 'f'))))
    actual.update(loss)
''',
}
CORRECT = '''
# Averaged by the program, at once, one by one, or with objects:
part = comm.split(0, comm.rank)
for kind in range(4):
    for _ in range(4):
        model.cleargrads()
        loss().backward()
        if kind == 0:
            comm.multi_node_mean_grad(model)
        elif kind == 1:
            for param in model.params():
                param.grad = comm.allreduce(param.grad) / comm.size
        elif kind == 2:
            for param in model.params():
                param.grad = comm.allreduce_obj(param.grad) / comm.size
        else:
            part.multi_node_mean_grad(model)
        actual.update()
# Only the loss, as in model parallelism:
for _ in range(4):
    actual.update(lambda: chainer.functions.sum(chainermn.functions.allreduce(
        comm, loss().reshape(1))))
# Used in all ways:
for options in {}, {'n_accumulations': 2}, {'overlap': 'always'}, {'shard_states': True}:
    other = chainermn.create_multi_node_optimizer(
        chainer.optimizers.Adam(), comm, **options).setup(model)
    for _ in range(9): other.update(loss)
    assert other.t == (4 if 'n_accumulations' in options else 8)
# A join, in which this rank only takes part in updates of the others:
joined = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(model)
with chainermn.join(joined):
    for _ in range(1 + 5 * comm.rank): joined.update(loss)
# A GAN:
gan = [chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(
    chainer.links.Linear(2, 1)) for _ in range(2)]
for _ in range(5):
    for each in gan:
        each.update(lambda: chainer.functions.sum(each.target(np.ones((1, 2), 'f'))))
# An update that makes several steps:
class Twice(chainer.optimizers.SGD):
    def update(self, *args, **kwds):
        super().update(*args, **kwds)
        super().update(*args, **kwds)
twice = chainermn.create_multi_node_optimizer(Twice(), comm).setup(model)
for _ in range(5): twice.update(loss)
assert twice.t == 8
# Steps of a copy, or of an optimizer of its own:
import copy
for local in copy.deepcopy(actual), chainer.optimizers.SGD().setup(chainer.links.Linear(2, 1)):
    for _ in range(4):
        local.update(lambda: chainer.functions.sum(local.target(np.ones((1, 2), 'f'))))
# Two multi-node optimizers of one optimizer, only one of which is used:
for used in range(2):
    shared = chainer.optimizers.SGD().setup(model)
    both = [chainermn.create_multi_node_optimizer(shared, comm) for _ in range(2)]
    for _ in range(5): both[used].update(loss)
# With a communicator of a third party, nobody knows what the program has averaged:
from version7 import Version7Communicator
theirs = Version7Communicator()
own = chainer.optimizers.SGD().setup(model)
unused = chainermn.create_multi_node_optimizer(own, theirs)
for _ in range(4):
    model.cleargrads()
    loss().backward()
    for param in model.params():
        param.grad = theirs.allreduce(param.grad) / 2
    own.update()
# Saved and loaded, to evaluate only:
chainer.serializers.save_npz(f'{comm.rank}.npz', twice)
evaluated = chainer.optimizers.SGD().setup(model)
unused = chainermn.create_multi_node_optimizer(evaluated, comm)
chainer.serializers.load_npz(f'{comm.rank}.npz', evaluated)
'''


def run(tmp_path, program):
    done = subprocess.run(['mpiexec', '-n', '2', sys.executable, '-c', START + program],
                          text=True, capture_output=True, cwd=tmp_path,
                          env={**os.environ, 'PYTHONPATH': TESTS})
    assert done.returncode == 0 and not done.stdout
    return done.stderr


TEXT = ('RuntimeWarning: the ranks do not average gradients: the script called SGD.update (3 '
        'steps) instead of update of the multi-node optimizer created here')


def test_only_the_actual_optimizer_was_updated(tmp_path):
    programs = [CORRECT] + [
        f'comm.rank or print("== {case}", file=sys.stderr, flush=True)\n{START}{program}'
        for case, program in WRONG.items()]
    found = run(tmp_path, '\n'.join(programs))
    assert found.startswith('== ')  # no warning of correct programs
    for case in WRONG:
        text = found.partition(f'== {case}\n')[2].partition('==')[0]
        assert text.count(TEXT) == 1, (case, text)
        if case == 'from the beginning':
            assert text.index('step 1') < text.index(TEXT) < text.index('step 2')


def test_one_rank():
    """There is nobody to average with; a warning would be an error here."""
    exec(START + WRONG['after training'], {})
