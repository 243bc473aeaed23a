"""Programs of the kind that users write: a training loop over two ranks, by send and recv."""

import numpy as np
import pytest
from jobs import run_job

pytestmark = pytest.mark.mpi_skip

START = '''
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import chainermn
from chainermn.functions import recv, send

comm = chainermn.create_communicator('naive')
STEPS = 4
'''

#: Rank 1 asks rank 0 in each step, and trains with the answer.
TRAIN = '''
numbers = open(f'NAME {comm.rank}', 'w', buffering=1)
if comm.rank == 0:
    for step in range(STEPS):
        z = recv(comm, 1)  # question
        numbers.write(f'{z.array.item()}\\n')
        ANSWER
else:
    lin = L.Linear(1, 1, nobias=True, initialW=1)
    optimizer = chainer.optimizers.SGD(lr=1e-6).setup(lin)
    for step in range(STEPS):
        x = np.full((1, 1), 100 + step, 'f')
        QUESTION
        t = recv(comm, 0, DELEGATE)
        lin.cleargrads()
        LOSS.backward()  # of the loss
        numbers.write(f'{lin.W.grad.item()}\\n')
        optimizer.update()
'''


def program(name, answer, question, loss, delegate='a'):
    return (TRAIN.replace('NAME', name).replace('ANSWER', answer).replace('QUESTION', question)
            .replace('LOSS', loss).replace('DELEGATE', delegate))


def run(tmp_path, programs):
    return run_job(tmp_path, START + programs, limit=50, CHAINERMN_TIMEOUT='40')


def numbers(tmp_path, name):
    """The numbers that each rank wrote."""
    return [[*map(float, (tmp_path / f'{name} {rank}').read_text().split())] for rank in range(2)]


def by_hand(gradient):
    """The weight before each step, and its gradients, as a function of weight and input."""
    weights, gradients = [np.float32(1)], []
    for x in np.arange(100, 104, dtype=np.float32):
        gradients.append(gradient(weights[-1], x))
        weights.append(weights[-1] - np.float32(1e-6) * gradients[-1])
    return weights[:-1], gradients


X = [100, 101, 102, 103]

#: What rank 0 answers; how rank 1 asks; its loss; what rank 0 gets and the gradient, for a weight
#: and an input.
PROGRAMS = {
    'rank 0 is a teacher that is not trained': (
        'send(z.array * 10, comm, 1)', 'a = send(x, comm, 0)', 'F.sum((lin(x) - t) ** 2 / 2)',
        lambda w, x: x, lambda w, x: (w * x - 10 * x) * x),
    'it runs backward all the same': (
        'send(z.array * 10, comm, 1).backward()', 'a = send(x, comm, 0)',
        'F.sum((lin(x) - t) ** 2 / 2)', lambda w, x: x, lambda w, x: (w * x - 10 * x) * x),
    'it gets what rank 1 computed, as an array': (
        'send(z.array * 10, comm, 1)', 'a = send(lin(x).array, comm, 0)', 'F.sum(lin(x) * t * .5)',
        lambda w, x: w * x, lambda w, x: 5 * w * x * x),
    'rank 0 is a part of the model': (
        'send(z * 10, comm, 1).backward()', 'a = send(lin(x), comm, 0)', 'F.sum(t * .5)',
        lambda w, x: w * x, lambda w, x: 5 * x),
}


def test_training_loops(tmp_path):
    cases = {f'{name}, {delegate}': (case, delegate) for name, case in PROGRAMS.items()
             for delegate in ('a', 'None') if delegate == 'a' or 'is a part' not in name}
    done = run(tmp_path, ''.join(
        program(name, *case[:3], delegate) for name, (case, delegate) in cases.items()))
    assert done.returncode == 0, done.stdout
    for name, ((*_, get, gradient), _) in cases.items():
        weights, expected = by_hand(gradient)
        got, gradients = numbers(tmp_path, name)
        np.testing.assert_allclose(
            got, [get(w, x) for w, x in zip(weights, X, strict=True)], 1e-5, err_msg=name)
        np.testing.assert_allclose(gradients, expected, 1e-5, err_msg=name)


@pytest.mark.slow
def test_rank_0_cuts_the_graph_but_rank_1_asks_for_a_gradient(tmp_path):
    """Nothing is taken for something else: the job ends, and the report names both calls."""
    done = run(tmp_path, program('cut', 'send(z.array * 10, comm, 1)', 'a = send(lin(x), comm, 0)',
                                 'F.sum(t * .5)'))
    assert done.returncode != 0
    assert numbers(tmp_path, 'cut') == [[100], []]
    lines = (START + TRAIN).splitlines()
    question, loss = (next(n for n, line in enumerate(lines, 1) if line.endswith(f'# {text}'))
                      for text in ('question', 'of the loss'))
    sent = next(n for n, line in enumerate(lines, 1) if 'QUESTION' in line)
    assert ('deadlock: rank 0 waits in recv_activation #3 from rank 1 tag 0 '
            f'(script.py:{question}) for rank 1; rank 1 waits in recv_gradient #3 from rank 0 '
            f'tag 0 of the send at script.py:{sent} (script.py:{loss}) for rank 0\n') in done.stdout
