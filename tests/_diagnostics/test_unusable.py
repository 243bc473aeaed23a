"""After the end of the script, and in a forked child, every operation raises an error at once."""

import inspect
import json
import pathlib
import re

import pytest
from jobs import run_job

from chainermn._operations.table import RECV, REQUEST, SEND
from chainermn.communicators import CommunicatorBase

pytestmark = pytest.mark.mpi_skip

TESTS = pathlib.Path(__file__).parents[1]

START = f'import sys; sys.path.append({str(TESTS)!r})' + '''
import atexit, functools, json, os
import chainer
import contract
import numpy as np
import chainermn

def failures():
    """The error of each operation, by its name."""
    found = {}
    for name, call in {**operations(comm), **others}.items():
        try:
            call()
        except RuntimeError as error:
            found[name] = str(error)
        else:
            found[name] = 'nothing'
    return found

def operations(comm):
    x, model = np.ones(3, 'f'), contract.model()
    other = (comm.rank + 1) % comm.size
    return {
        **{name: functools.partial(contract.call, comm, name)
           for name in contract.NAMES if name != 'finalize'},
        'serve': lambda: comm.serve(lambda source, request: []),
        'refuse': lambda: comm.refuse('load', ValueError('is damaged')),
        'join_turn': lambda: comm._chainermn_channel.join_turn(1),
        'send': lambda: comm.send(x, other, 0),
        'recv': lambda: comm.recv(other, 0),
        'isend': lambda: comm.isend(x, other),
        'irecv': lambda: comm.irecv(other),
        'send_activation': lambda: comm._chainermn_channel.send_activation(x, other, 0, True),
        'recv_activation': lambda: comm._chainermn_channel.recv_activation(other, 0),
        'send_obj': lambda: comm.send_obj({}, other),
        'recv_obj': lambda: comm.recv_obj(other),
        'broadcast_data': lambda: comm.broadcast_data(model),
        'allgather_shards': lambda: comm._chainermn_channel.allgather_shards([[x]] * comm.size),
        'mean_grad_shards': lambda: comm._chainermn_channel.mean_grad_shards(model, True, []),
        'allreduce_grad': lambda: comm.allreduce_grad(model, zero_fill=True),
        'check_replicas': lambda: comm.check_replicas(model),
        'mean_queue': lambda: comm.split(0, 0).mean_queue(),
    }

def use():
    """Operations of what the communicator gives."""
    global request
    queue, service = comm.mean_queue(), comm.serve(lambda source, request: [b'answer'])
    queue.submit({'x': np.ones(3, 'f')})
    queue.wait()
    assert service.ask({0: [b'question']})[0].tobytes() == b'answer'
    others.update({
        'submit': lambda: queue.submit({'x': np.ones(3, 'f')}),
        'wait': queue.wait,
        'cancel': queue.cancel,
        'ask': lambda: service.ask({0: [b'question']}),
        'create_communicator': lambda: chainermn.create_communicator('naive'),
    })
    others['mean_queue'] = others['wait']
    if comm.size > 1:
        request = comm.irecv((comm.rank - 1) % comm.size)
        others['wait'] = request.wait
        others['test'] = request.test
        others['waitall'] = lambda: comm.waitall([request])

def complete():
    """Complete the request, which is then of no more use."""
    if comm.size > 1:
        for name in ('wait', 'test', 'waitall'):
            del others[name]
        comm.isend(np.ones(1), (comm.rank + 1) % comm.size)
        request.wait()

def show(found):
    sys.stdout.write(json.dumps([comm.rank, found]) + '\\n')
    sys.stdout.flush()

others = {}
'''

AT_THE_END = START + '''
@atexit.register  # before there is a communicator, so it is called after this is shut down
def late():
    found = failures()
    comm.finalize()
    assert (comm.rank, comm.size) == (int(os.environ.get('PMI_RANK', 0)), comm.size)
    show(found)

comm = chainermn.create_communicator(sys.argv[1])
use()
complete()
'''

FINALIZED = START + '''
from mpi4py import MPI
comm = chainermn.create_communicator(sys.argv[1])
use()
complete()
MPI.Finalize()
show(failures())
'''

IN_A_CHILD = START + '''
comm = chainermn.create_communicator(sys.argv[1])
use()
pid = os.fork()
if pid == 0:
    found = failures()
    comm.finalize()
    show(found)
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
# The rank itself continues.
assert comm.allreduce_obj(1) == comm.size
if comm.size > 1:
    comm.isend(np.ones(1), (comm.rank + 1) % comm.size)
    assert request.wait() == 1
queue = comm.mean_queue()
result, = queue.submit({'x': np.ones(3, 'f')})
queue.wait()
assert result.tolist() == [1, 1, 1]
'''

#: Public methods that need no other rank, or a GPU.
ALONE = {'set_config', 'get_config', 'config_scope', 'span', 'finalize', 'called_by'}

#: Operations of methods with other names; `mean_queue` stands for its `wait`.
OPERATIONS = {'join_turn': 'join', 'broadcast_data': 'bcast_data',
              'allreduce_grad': 'multi_node_mean_grad', 'mean_grad_shards': 'multi_node_mean_grad',
               'mean_queue': 'wait', 'ask': REQUEST, 'send_activation': SEND,
               'recv_activation': RECV}


def run(tmp_path, script, ranks, name='flat', **env):
    return run_job(tmp_path, script, name, ranks=ranks, limit=50, options=('-W', 'ignore'), **env)


def check(done, ranks, why):
    assert done.returncode == 0, done.stdout
    assert all(line.startswith('[') for line in done.stdout.splitlines()), done.stdout
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    assert sorted(found) == list(range(ranks)), done.stdout
    methods = {name for name, _ in inspect.getmembers(CommunicatorBase, inspect.isfunction)
               if not name.startswith('_')}
    for failures in found.values():
        assert methods - ALONE - {'waitall'} <= set(failures)
        for name, text in failures.items():
            assert why in text, (name, text)
            assert text.partition(':')[0] == OPERATIONS.get(name, name), text


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize('ranks', [1, 2, 3])
def test_operations_raise_after_the_end_of_the_program(tmp_path, ranks):
    done = run(tmp_path, AT_THE_END, ranks)
    check(done, ranks, 'the communicators of this rank were shut down at the end of the script')


@pytest.mark.slow
def test_operations_raise_after_mpi_is_finalized(tmp_path):
    check(run(tmp_path, FINALIZED, 2), 2, 'your script has called MPI.Finalize()')


@pytest.mark.sample(1)
@pytest.mark.parametrize('name, ranks, has_timeline', [
    ('flat', 2, True), ('naive', 1, False), ('flat', 3, False), ('flat', 1, False),
    ('naive', 2, False)])
def test_operations_raise_in_a_forked_child(tmp_path, name, ranks, has_timeline):
    env = {'CHAINERMN_TIMELINE': str(tmp_path / 'timeline.json')} if has_timeline else {}
    done = run(tmp_path, IN_A_CHILD, ranks, name, **env)
    check(done, ranks, 'was forked from the rank in process ')


LATE = '''
import atexit, sys, threading, types
import chainermn
from chainermn._diagnostics import unusable

def late():
    print('called', flush=True)
    comm.allreduce_obj(1)

class Logger:
    def __del__(self):
        late()

is_shut_down, shut_down = threading.Event(), unusable.shut_down

def beat():
    is_shut_down.wait()
    comm.send_obj('alive', 0)

def shut_down_first(is_finalized):
    shut_down(is_finalized)
    is_shut_down.set()
    thread.join()

if sys.argv[1] == 'atexit':
    atexit.register(late)
comm = chainermn.create_communicator('naive')
if sys.argv[1] == 'others':
    thread = threading.Thread(target=beat, daemon=True, name='heart')
    thread.start()
    unusable.shut_down = shut_down_first
    if comm.rank == 0:
        sys.modules['logs'] = module = types.ModuleType('logs')
        module.logger = Logger()
'''


@pytest.mark.slow
def test_an_error_in_atexit_aborts_the_job(tmp_path):
    done = run(tmp_path, LATE, 2, 'atexit')
    assert done.returncode != 0
    assert 'uncaught RuntimeError in an atexit function' in done.stdout
    assert 'RuntimeError: allreduce_obj: the communicators of this rank were shut d' in done.stdout


@pytest.mark.slow
def test_errors_in_a_late_daemon_thread_and_in_a_finalizer_are_printed(tmp_path):
    """The finalizer is called on one rank alone: before, it waited for the others forever."""
    done = run(tmp_path, LATE, 2, 'others')
    assert done.returncode == 0, done.stdout
    assert 'Exception in thread heart' in done.stdout
    assert 'send_obj: the communicators of this rank were shut down' in done.stdout
    assert done.stdout.count('called') == 1
    assert re.search(r'Exception ignored .*<function Logger\.__del__', done.stdout)
    assert 'RuntimeError: allreduce_obj: the communicators of this rank were shut d' in done.stdout


FAILS = '''
import atexit, sys
import chainermn

@atexit.register
def late():
    comm.barrier()

comm = chainermn.create_communicator('naive')
if comm.rank == 0:
    sys.exit(5)
comm.barrier()
'''


def test_a_failed_rank_waits_for_no_others_in_atexit(tmp_path):
    done = run(tmp_path, FAILS, 2)
    assert done.returncode == 5
    assert 'RuntimeError: barrier: the communicators of this rank were shut down' in done.stdout
    assert done.stdout.count('aborts the job') == 1
    assert 'aborts the job: sys.exit with status 5' in done.stdout
