"""Where an operation was called: the line of the program, and what passed it on."""

import os

import chainer
import numpy as np
import pytest
from chainer.training import extensions
from shared_fixtures import raises_on_all

import chainermn

FILE = os.path.basename(__file__)


def line_of(text):
    with open(__file__, encoding='utf-8') as file:
        return next(number for number, line in enumerate(file, 1) if line.endswith(f'# {text}\n'))


def message(comm):
    with raises_on_all(ValueError, match='ranks called different operations') as caught:
        if comm.rank == 0:
            comm.barrier()  # first
        elif comm.rank == 1:
            chainermn.scatter_dataset([1, 2], comm)  # second
        else:
            evaluate(comm)
    return str(caught.value)


def evaluate(comm):
    evaluator = extensions.Evaluator({}, chainer.Link())
    evaluator.evaluate = dict
    chainermn.create_multi_node_evaluator(evaluator, comm)(None)  # through Chainer


@pytest.mark.mpi(min_size=2)
def test_the_rank_of_an_error_reports_the_same_call_site_as_the_others(comm):
    with pytest.raises(TypeError, match='failed on rank 0') as caught:
        chainermn.scatter_dataset(None, comm)
    # Equal call sites are not printed.
    assert str(caught.value).splitlines()[2:] in (
        [f'  {ranks}: scatter_dataset']
        for ranks in ('rank 1', f'ranks 1-{comm.size - 1}'))


@pytest.mark.mpi(min_size=2)
def test_each_rank_says_where_it_called(comm):
    text = message(comm)
    assert f'rank 0: barrier, called at {FILE}:{line_of("first")}' in text
    assert ('rank 1: gather_obj root=0 of scatter_dataset, '
            f'called at {FILE}:{line_of("second")}') in text
    if comm.size > 2:
        assert ('allgather_obj of create_multi_node_evaluator, '
                f'called at {FILE}:{line_of("through Chainer")}') in text


@pytest.mark.mpi(min_size=2)
@pytest.mark.compares_calls
def test_each_rank_names_the_differentiable_function(comm):
    functions = chainermn.functions
    y = functions.allgather(comm, chainer.Variable(np.ones(2, 'f')))[0]
    y.grad = np.ones_like(y.array)
    with raises_on_all(ValueError, match='ranks called different operations') as caught:
        if comm.rank == 0:
            y.backward()  # not on the others
        else:
            functions.bcast(comm, np.ones(2, 'f'))  # other
    text = str(caught.value)
    assert (', in backward of chainermn.functions.allgather, called at '
            f'{FILE}:{line_of("not on the others")}') in text
    assert f', in chainermn.functions.bcast, called at {FILE}:{line_of("other")}' in text
