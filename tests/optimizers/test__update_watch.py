"""A program that only updates the actual optimizer is warned, and no correct one."""
import subprocess
import sys

import pytest

pytestmark = pytest.mark.mpi_skip

START = '''
import chainer, numpy as np, chainermn
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
    'at the third update': """
import sys
for step in range(5):
    actual.update(loss)
    print(f'step {step}' * (comm.rank == 0), file=sys.stderr, flush=True)
""",
    'at the end': 'for _ in range(2): actual.update(loss)',
    'in a function': 'main()',
}
CORRECT = '''
# Averaged by the program:
for _ in range(3):
    model.cleargrads()
    loss().backward()
    comm.multi_node_mean_grad(model)
    actual.update()
# Updated, and loaded:
assert chainer.optimizer.GradientMethod.update.__module__ == (
    'chainermn.optimizers._update_watch' if comm.rank == 0 and comm.size > 1 else
    'chainer.optimizer')
del optimizer
other = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(model)
for _ in range(3): other.update(loss)
assert chainer.optimizer.GradientMethod.update.__module__ == 'chainer.optimizer'
for _ in range(3): other.actual_optimizer.update(loss)
chainer.serializers.save_npz(f'{comm.rank}.npz', other)
loaded = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(model)
chainer.serializers.load_npz(f'{comm.rank}.npz', loaded)
assert loaded.t == 5
# Loaded to evaluate only:
evaluated = chainer.optimizers.SGD().setup(model)
unused = chainermn.create_multi_node_optimizer(evaluated, comm)
chainer.serializers.load_npz(f'{comm.rank}.npz', evaluated)
# Two multi-node optimizers of one optimizer, only one of which is used:
shared = chainer.optimizers.SGD().setup(model)
both = [chainermn.create_multi_node_optimizer(shared, comm) for _ in range(2)]
for _ in range(5): both[1].update(loss)
'''


def run(tmp_path, program, ranks=2):
    done = subprocess.run(['mpiexec', '-n', str(ranks), sys.executable, '-c', START + program],
                          text=True, capture_output=True, cwd=tmp_path)
    assert done.returncode == 0 and not done.stdout
    return done.stderr


@pytest.mark.parametrize('case', WRONG)
def test_only_the_actual_optimizer_was_updated(tmp_path, case):
    found = run(tmp_path, WRONG[case])
    steps = 2 if case == 'at the end' else 3
    text = (f'RuntimeWarning: the ranks do not average gradients: the program called '
            f'SGD.update ({steps} steps) instead of update of the multi-node optimizer created '
            'here')
    assert found.count(text) == 1
    if case == 'at the third update':
        assert found.index('step 1') < found.index(text) < found.index('step 2')


def test_correct_programs(tmp_path):
    assert run(tmp_path, CORRECT) == ''
    assert run(tmp_path, WRONG['at the end'], ranks=1) == ''
