"""Hyperparameter search with Optuna: the program of docs/migrating.md, and ChainerMNStudy.

They need Optuna: ``tox -e fast-py314`` runs them with the last version that has ChainerMNStudy.
"""

import pathlib
import re

import chainer
import numpy as np
import pytest

import chainermn

optuna = pytest.importorskip('optuna')
pytestmark = [pytest.mark.mpi(min_size=2),
              pytest.mark.filterwarnings('ignore::FutureWarning')]


@pytest.fixture
def comm():
    comm = chainermn.create_communicator('naive')
    yield comm
    comm.finalize()


def test_page(comm, capsys):
    page = pathlib.Path(__file__).parents[2].joinpath('docs', 'migrating.md').read_text('utf-8')
    program, = re.findall(r'test_optuna.py runs it -->\n```python\n(.*?)```', page, re.S)
    names = {'__name__': 'optuna_program'}
    exec(program.replace('range(10)', 'range(3)'), names)
    assert np.isfinite(names['loss']) and len(set(comm.allgather_obj(names['loss']))) == 1
    if comm.rank == 0:
        assert len(names['study'].trials) == 3
        assert str(names['study'].best_params) in capsys.readouterr().out


def test_chainermn_study(comm, tmp_path_factory):
    integration = pytest.importorskip('optuna_integration')
    if not hasattr(integration, 'ChainerMNStudy'):
        pytest.skip('this version has no ChainerMNStudy')
    path = comm.bcast_obj(f'{tmp_path_factory.mktemp("optuna")}/journal')
    journal = optuna.storages.journal
    storage = optuna.storages.JournalStorage(journal.JournalFileBackend(path))
    if comm.rank == 0:
        optuna.create_study(study_name='s', storage=storage)
    comm.barrier()
    study = integration.ChainerMNStudy(optuna.load_study(study_name='s', storage=storage), comm)
    seen = []

    def objective(trial, comm):
        x = trial.suggest_float('x', -1, 1)
        seen.append(x)
        model = chainer.Chain()
        with model.init_scope():
            model.w = chainer.Parameter(np.full(1, x, 'f'))
        optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(.5), comm)
        optimizer.setup(model)
        for _ in range(2):  # the first update only broadcasts the parameters
            optimizer.update(lambda: chainer.functions.sum(model.w ** 2) * (comm.rank + 1))
        return float(model.w.array[0])

    study.optimize(objective, n_trials=3)
    xs, *others = comm.allgather_obj(seen)
    assert len(xs) == 3 and all(other == xs for other in others)
    # w - lr * mean of 2 * w * (rank + 1) over the ranks
    expected = [x - x * (comm.size + 1) / 2 for x in xs]
    values = comm.bcast_obj([t.value for t in study.trials] if comm.rank == 0 else None)
    np.testing.assert_allclose(values, expected, rtol=1e-5)
