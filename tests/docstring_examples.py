"""Runs the examples in the docstrings of all public functions, classes and methods.

``mpiexec -n 2 python tests/docstring_examples.py [NAME ...]`` runs them in one job. Before each
example, it runs the lines in docs/reference/index.rst. Rank 0 compares its output with the
docstring; other ranks only check that an example raises no unexpected error.
"""

import doctest
import importlib
import inspect
import os
import pathlib
import sys
import tempfile
import types

import chainermn

ROOT = pathlib.Path(__file__).parents[1]

#: Public names that need no example, grouped by the reason.
EXCEPTIONS = {
    'Chainer calls it': {
        *(f'chainermn.MultiNodeCheckpointer.{name}' for name in ('initialize', 'on_error')),
        *(f'chainermn.communicators.compression.{name}.serialize'
          for name in ('PowerSGD', 'TwoBit')),
        'chainermn.extensions.LinearScaling.initialize',
        'chainermn.extensions.MultiNodeEarlyStoppingTrigger.serialize',
        'chainermn.extensions.ObservationAggregator.serialize',
        *(f'chainermn.extensions.{kind}.{name}' for kind in ('ProgressBar', 'TensorBoardWriter')
          for name in ('initialize', 'finalize')),
        *(f'chainermn.extensions.RunRecord.{name}' for name in (
            'finalize', 'initialize', 'trigger')),
        *(f'chainermn.iterators.ShardedIterator.{name}'
          for name in ('finalize', 'next', 'reset', 'serialize')),
    },
    'it needs PyTorch': {f'chainermn.extensions.TorchRecord{name}' for name in (
        '', '.begin', '.close', '.loss')},
    'logging calls it': {'chainermn.RankFilter.filter'},
    'the checkpointer calls it': {
        f'chainermn.iterators.MultiNodeOrderSampler.{name}' for name in ('note_epoch', 'resume')},
    'the transport calls it': {'chainermn.communicators.compression.PowerSGD.mean'},
    'communicators call it': {
        *(f'chainermn.communicators.transport.MpiTransport.{name}' for name in (
            'allgather', 'allreduce', 'alltoall', 'bcast', 'bcast_arrays', 'carries', 'connect',
            'copy_arrays', 'free', 'gather', 'groups', 'mean', 'mean_compressed',
            'mean_for_owners', 'reduce', 'reduce_scatter', 'requirements', 'scatter',
            'set_passive_wait', 'sums')),
        'chainermn.communicators.transport.SharedMemoryTransport.mean_compressed',
    },
    'an argument of transports': {
        'chainermn.communicators.transport.Group',
        *(f'chainermn.communicators.transport.Codec{name}'
          for name in ('', '.encode', '.compress', '.decompress')),
    },
    'for scripts of older versions': {
        'chainermn.CommunicatorBase.allreduce_grad',
        'chainermn.CommunicatorBase.broadcast_data',
        'chainermn.DataSizeError',
        'chainermn.datasets.scatter.get_epoch_trigger',
        'chainermn.datasets.scatter.get_n_iterations_for_one_epoch',
        'chainermn.functions.all_to_all',
    },
}

#: Public names whose examples need GPUs, and are skipped.
ON_GPUS = {
    'chainermn.communicators.non_cuda_aware_communicator.NonCudaAwareCommunicator',
    'chainermn.communicators.pure_nccl_communicator.PureNcclCommunicator',
}

#: Public names whose examples are programs for one process.
ON_ONE_RANK = {'chainermn.launch'}


def public_docstrings(paths):
    """Return the docstrings of functions, classes and their methods, by name; each object once.

    Args:
        paths: Names of public objects. Objects other than functions and classes are ignored.
    """
    found = {}
    for path in paths:
        module, _, name = path.rpartition('.')
        one = getattr(importlib.import_module(module), name)
        if isinstance(one, types.GenericAlias):  # a class for Python 3.10
            continue
        if inspect.isclass(one) or inspect.isfunction(one):
            found.setdefault(one, path)
        if inspect.isclass(one):
            for name in dir(one):
                method = inspect.unwrap(getattr(one, name, None))
                method = getattr(method, '__func__', method)  # of a class method
                if name[0] != '_' and isinstance(method, types.FunctionType) and (
                        method.__doc__ and method.__module__.startswith('chainermn.')):
                    found.setdefault(method, f'{path}.{name}')
    return {name: one.__doc__ for one, name in found.items()}


def run(docstrings, rank):
    """Run examples on this rank; return the number of failures."""
    parser = doctest.DocTestParser()
    page = ROOT / 'docs' / 'reference' / 'index.rst'
    start = parser.get_examples(page.read_text(encoding='utf-8'))
    runner = doctest.DocTestRunner(
        doctest.OutputChecker() if rank == 0 else _AnyOutput(), verbose=False,
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for name, docstring in docstrings.items():
        examples = parser.get_examples(docstring)
        if name not in ON_ONE_RANK:
            examples = [*start, *examples]
        elif rank > 0:
            continue
        test = doctest.DocTest(examples, {'chainermn': chainermn}, name, None, None, docstring)
        runner.run(test, clear_globs=False)  # a service of another rank may still use them
    return runner.summarize(verbose=False).failed


class _AnyOutput(doctest.OutputChecker):
    """Accepts any output."""

    def check_output(self, want, got, optionflags):
        return True


def main(names):
    """Run the examples of these names, by default all, on the ranks of this job."""
    from public_names import public

    comm = chainermn.create_communicator('naive')
    docstrings = {name: docstring for name, docstring in public_docstrings(public()).items()
                  if '>>>' in docstring and name in (names or [name])}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(comm.bcast_obj(folder))
        failed = comm.allreduce_obj(run(docstrings, comm.rank))
        os.chdir('/')
    if comm.rank == 0:
        print(f'ran the examples of {len(docstrings)} docstrings', flush=True)
    sys.exit(failed > 0)


if __name__ == '__main__':
    main(sys.argv[1:])
