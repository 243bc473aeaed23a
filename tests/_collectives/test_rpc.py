"""Services: busy ranks answer, errors are raised on the requesting rank, and programs end."""

import sys
import threading
import time

import numpy as np
import pytest
from jobs import run_job
from shared_fixtures import communicators

alone = pytest.mark.mpi_skip

comm = communicators('naive')


@pytest.fixture
def serve(comm):
    """Make services that are closed after the test."""
    services = []

    def serve(answer):
        services.append(comm.serve(answer))
        return services[-1]

    yield serve
    for service in services:
        service.close()
        service._thread.join()


def test_all_ranks_ask_all_ranks(comm, serve):
    def answer(source, request):
        assert (request.dtype, request.ndim) == (np.uint8, 1)
        return [np.array([source, comm.rank]), request, b'end']

    service = serve(answer)
    for length in (0, 1, 1000, 300_000):
        question = [np.full(length, comm.rank, np.uint8), np.arange(3)]
        answers = service.ask({rank: question for rank in range(comm.size)})
        assert sorted(answers) == list(range(comm.size))
        for rank, found in answers.items():
            assert found.dtype == np.uint8
            assert found.tobytes() == (np.array([comm.rank, rank]).tobytes() + b''.join(question)
                                       + b'end')


def test_asks_some_or_no_ranks(comm, serve):
    service = serve(lambda source, request: [np.array([comm.rank])])
    assert service.ask({}) == {}
    other = (comm.rank + 1) % comm.size
    assert [(rank, found.view(int)[0]) for rank, found in service.ask({other: []}).items()] == \
        [(other, other)]


@pytest.mark.parametrize('how', ['waits in MPI', 'sleeps', 'computes', 'runs Python'])
def test_busy_rank_answers(comm, serve, how):
    """Rank 0 does not continue before the others have their answers."""
    asked = []

    def answer(source, request):
        asked.append(source)
        return [request]

    service = serve(answer)
    n = 10 * (comm.size - 1)
    if comm.rank == 0:
        if how == 'waits in MPI':
            for rank in range(1, comm.size):
                comm.recv_obj(rank)
        x = np.ones((100, 100))
        while len(asked) < n:
            if how == 'sleeps':
                time.sleep(.1)
            elif how == 'computes':
                x = x @ x / 100
            else:
                sum(range(10_000))
    else:
        for i in range(10):
            assert service.ask({0: [bytes([i])]})[0].tolist() == [i]
        if how == 'waits in MPI':
            comm.send_obj('done', 0)
    comm.barrier()


def test_large_messages_do_not_deadlock(comm, serve):
    """All ranks ask all ranks from two threads, without a deadlock."""
    service = serve(lambda source, request: [request, request])
    wrong = []

    def ask(seed):
        for i in range(4):
            question = np.full(200_000, seed + i, np.uint8)
            for found in service.ask({rank: [question] for rank in range(comm.size)}).values():
                if not (len(found) == 400_000 and (found == seed + i).all()):
                    wrong.append(found)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in (0, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    comm.barrier()


def test_one_request_at_a_time(comm, serve):
    inside = []

    def answer(source, request):
        inside.append(source)
        time.sleep(.001)
        assert inside == [source]
        inside.clear()
        return []

    service = serve(answer)
    others = {rank: [] for rank in range(comm.size) if rank != comm.rank}
    for _ in range(5):
        service.ask(others)
    comm.barrier()


def test_errors_are_raised_on_the_requesting_rank(comm, serve):
    def answer(source, request):
        if len(request):
            raise KeyError('nothing like that')
        return [b'fine']

    service = serve(answer)
    last = comm.size - 1
    if comm.rank == 0:
        with pytest.raises(KeyError, match='nothing like that') as caught:
            service.ask({rank: [b'x'] if rank == last else [] for rank in range(comm.size)})
        assert (f'raised on rank {last}, at test_rpc.py:' in str(caught.value)) == (last != 0)
    for rank in range(comm.size):
        assert service.ask({rank: []})[rank].tobytes() == b'fine'
    comm.barrier()


def test_exit_in_answer_is_raised_on_the_requesting_rank(comm, serve):
    def answer(source, request):
        sys.exit('early')

    service = serve(answer)
    other = (comm.rank + 1) % comm.size
    error = SystemExit if other == comm.rank else RuntimeError
    for _ in range(2):
        with pytest.raises(error, match='early'):
            service.ask({other: []})


def test_answer_must_not_send_requests(comm, serve):
    def answer(source, request):
        service.ask({source: []})

    service = serve(answer)
    comm.barrier()
    for rank in range(comm.size):
        with pytest.raises(RuntimeError, match='must not send requests'):
            service.ask({rank: []})


def test_invalid_answer_raises_on_all_ranks(comm):
    with pytest.raises(TypeError, match='answer must be a function'):
        comm.serve(None if comm.rank == comm.size - 1 else lambda source, request: [])
    comm.barrier()


def test_closed_service_continues_to_answer(comm):
    service = comm.serve(lambda source, request: [request])
    if comm.rank == 0:
        service.close()
        service.close()
        with pytest.raises(ValueError, match='closed on this rank'):
            service.ask({0: []})
    else:
        for i in range(20):
            assert service.ask({0: [bytes([i])]})[0].tolist() == [i]
        time.sleep(.01 * comm.rank)
        assert service.ask({0: [b'x']})[0].tobytes() == b'x'
        service.close()
    service._thread.join()


START = '''
import sys, time
import numpy as np
import chainermn
comm = chainermn.create_communicator('naive')
service = comm.serve(lambda source, request: [request])
def ask(times, pause=0):
    for i in range(times):
        for rank in range(comm.size):
            assert service.ask({rank: [bytes([i])]})[rank].tolist() == [i]
        time.sleep(pause)
'''


def run(tmp_path, body, ranks=3, **env):
    return run_job(tmp_path, START + body, ranks=ranks, **env)


@pytest.mark.sample(1)
@alone
@pytest.mark.parametrize('body', [
    '',
    'ask(10 * comm.rank, .01)',  # rank 0 ends first, and the others ask it
    'ask(3); service.close(); time.sleep(.1 * comm.rank)',
    'if comm.rank == 0: service.close()\nask(0 if comm.rank == 0 else 10, .01)',
    'comm.barrier(); comm.finalize(); ask(10 * comm.rank, .01)',
    '''
try:
    if comm.rank == 1:
        raise ValueError('caught')
    ask(20, .01)
except ValueError:
    pass
''',
])
def test_clean_exit(tmp_path, body):
    done = run(tmp_path, body, ranks=2)
    assert (done.returncode, done.stdout) == (0, '')


@pytest.mark.slow
@pytest.mark.sample(2)
@alone
@pytest.mark.parametrize('body, text', [
    ('if comm.rank == 0: comm.barrier()\nask(5 * (comm.rank > 0), .01)', 'end of the script'),
    ('ask(3)\nif comm.rank == 1: raise ValueError("no such luck")\nask(10**9)', 'no such luck'),
    ('ask(3)\nif comm.rank == 1: sys.exit(3)\nask(10**9)', 'sys.exit with status 3'),
])
def test_exit_with_an_error(tmp_path, body, text):
    done = run(tmp_path, body)
    assert done.returncode != 0
    assert text in done.stdout


@pytest.mark.slow
@alone
def test_needs_threads(tmp_path):
    body = '''
except RuntimeError as error:
    assert 'MPI_THREAD_MULTIPLE' in str(error), error
    if comm.rank == 0:
        print('failed')
comm.barrier()
'''
    start = ('import mpi4py; mpi4py.rc.thread_level = "serialized"\n'
             + START[:START.index('service =')] + 'try:\n    comm.serve(print)\n')
    done = run_job(tmp_path, start + body.lstrip('\n'))
    assert (done.returncode, done.stdout) == (0, 'failed\n')
