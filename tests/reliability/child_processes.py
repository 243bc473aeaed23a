"""Start child processes in every way, and record how each of them ends.

``mpiexec -n 2 python tests/reliability/child_processes.py FOLDER [all]`` writes a JSON file per
rank, with an outcome for each combination of a start method, a kind of child and an ending, before
and after the rank creates a communicator. ``WITHOUT_CHAINERMN=1`` does not import chainermn.
``tests/test__launcher.py`` runs it.
"""

import concurrent.futures
import itertools
import json
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import chainer

if __name__ == '__main__' and 'PMI_FD' in os.environ:
    # Give the connection to mpiexec a number that belongs to other files in most of the children.
    os.environ['PMI_FD'] = str(os.dup2(int(os.environ['PMI_FD']), 4))

if not os.environ.get('WITHOUT_CHAINERMN'):
    import chainermn  # the children import it with this module, as with most training scripts

ENDINGS = ('return', 'raise', 'exit', 'killed')


def end(ending):
    """End a child process."""
    if ending == 'raise':
        raise ValueError('of a child')
    if ending == 'exit':
        sys.exit(3)
    if ending == 'killed':
        os.kill(os.getpid(), signal.SIGKILL)
    return 'returned'


def process(context, ending):
    child = context.Process(target=end, args=(ending,))
    child.start()
    child.join()
    return child.exitcode


def pool(context, ending):
    with context.Pool(1) as workers:
        worker, = workers._pool
        result = workers.apply_async(end, (ending,))
        if ending in ('return', 'raise'):
            return result.get()
        # The result never arrives. A thread of the pool joins the worker, and starts another one.
        while worker in workers._pool:
            time.sleep(.01)
        return worker.exitcode


def executor(context, ending):
    with concurrent.futures.ProcessPoolExecutor(1, context) as executor:
        return executor.submit(end, ending).result()


def iterator(context, ending):
    multiprocessing.set_start_method(context.get_start_method(), force=True)
    batches = chainer.iterators.MultiprocessIterator([1, 2], 2, repeat=False, n_processes=1)
    batch = sorted(next(batches))
    batches.finalize()
    return batch


def command(ending):
    folder = os.path.dirname(os.path.abspath(__file__))
    code = f'import sys; sys.path[:0] = [{folder!r}]; import child_processes as this; '
    return [sys.executable, '-c', f'{code}this.end({ending!r})']


def program(context, ending):
    return subprocess.run(command(ending), check=False).returncode


def shell(context, ending):
    """Unlike a program, it inherits the connection to mpiexec."""
    return os.waitstatus_to_exitcode(os.system(shlex.join(command(ending))))


KINDS = {kind.__name__: kind for kind in (process, pool, executor, iterator, program, shell)}

#: All combinations. If a worker of an iterator fails, the rank fails.
ALL = [*itertools.product(('fork', 'forkserver', 'spawn'), ('process', 'pool', 'executor'),
                          ENDINGS),
       *itertools.product(('fork', 'forkserver', 'spawn'), ['iterator'], ['return']),
       *itertools.product([''], ['program', 'shell'], ENDINGS)]
#: Each start method, kind and ending. Every second one runs after a communicator was created.
SAMPLE = [('forkserver', 'process', 'return'), ('forkserver', 'pool', 'exit'),
          ('forkserver', 'process', 'raise'), ('forkserver', 'executor', 'killed'),
          ('spawn', 'process', 'exit'), ('fork', 'process', 'killed'),
          ('', 'program', 'exit'), ('forkserver', 'iterator', 'return'),
          ('', 'shell', 'exit')]


def outcome(method, kind, ending):
    """Return how a child ends, or what its parent raises."""
    context = multiprocessing.get_context(method) if method else None
    try:
        return repr(KINDS[kind](context, ending))
    except BaseException as error:
        return f'{type(error).__name__}: {error}'.splitlines()[0]


def main(folder, which=''):
    # The children, and the server that forks some of them, write to the same file.
    errors = os.path.join(folder, f'errors-{os.getpid()}')
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    found = {}

    def run(when, combinations):
        for combination in combinations:
            start = os.path.getsize(errors)
            how = outcome(*combination)
            with open(errors) as file:
                file.seek(start)
                printed = re.findall(r'^(?:chainermn: |\w*Error\b).*$', file.read(), re.MULTILINE)
            found[' '.join((when, *combination))] = how, printed

    run('before', ALL if which else SAMPLE[::2])
    if not os.environ.get('WITHOUT_CHAINERMN'):
        comm = chainermn.create_communicator('naive')
    run('after', ALL if which else SAMPLE[1::2])
    if not os.environ.get('WITHOUT_CHAINERMN'):
        comm.barrier()
    with open(os.path.join(folder, f'outcomes-{os.getpid()}'), 'w') as file:
        json.dump(found, file)


if __name__ == '__main__':
    main(*sys.argv[1:])
