"""``update`` with the loss of another model than that of ``setup``, which would not be trained."""

import chainer
import numpy as np
import pytest
from chainer import functions as F
from chainer import links as L
from each_case import each_case
from shared_fixtures import communicators

import chainermn

X, T = np.ones((4, 3), 'f'), np.ones(4, 'i')

comm = communicators('naive')


class Net(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.layer = L.Linear(3, 2)

    def forward(self, x, t=None):
        return F.sum(self.layer(x))

    def loss(self, x):
        return self.forward(x)


def optimizer_of(model, comm, **options):
    return chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(), comm, **options).setup(model)


@each_case('options, kind', [
    ({}, 'link'), ({'overlap': 'always'}, 'method'), ({'n_accumulations': 2}, 'link'),
    ({}, 'function')])
def test_another_model(comm, same_error, options, kind):
    optimizer, other = optimizer_of(Net(), comm, **options), Net()
    for again in range(2):
        if again:
            optimizer.is_changed(optimizer.target)  # as if the first update had been made
        lossfun = {'link': other, 'method': other.loss, 'function': lambda x: other(x)}[kind]
        error = same_error(lambda: optimizer.update(lossfun, X))  # noqa: B023
        assert type(error) is ValueError
        assert 'depends on no parameter of the Net passed to setup()' in str(error)


@pytest.mark.mpi(min_size=2)
def test_another_model_on_one_rank(comm, same_error):
    model, other = Net(), Net()
    optimizer = optimizer_of(model, comm)
    error = same_error(lambda: optimizer.update(other if comm.rank == 1 else model, X), failed=1)
    assert 'depends on no parameter' in str(error)


class Wrapper(chainer.Link):
    """A link without parameters, which calls a model."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)


def test_correct_programs_stay_silent(comm):
    model = Net()
    classifier = L.Classifier(model.layer)
    discriminator = L.Linear(2, 1)
    chain = chainer.Sequential(L.Linear(3, 3), L.Linear(3, 2))
    for target, lossfun, *args in [
            (model, model, X), (model, model.loss, X), (model.layer, model, X),
            (model.layer, classifier, X, T), (classifier, model, X),
            (chain, lambda x: F.sum(chain[1](x)), X), (model, Wrapper(model), X),
            # A generator whose loss is computed by another model:
            (model.layer, lambda x: F.sum(discriminator(model.layer(x))), X),
            # A loss that uses no parameter, as of a rank without data:
            (model, lambda: chainer.Variable(np.zeros((), 'f'))),
            (model, lambda: F.sum(chainer.Variable(X)) * 0)]:
        optimizer = optimizer_of(target, comm)
        for _ in range(3):
            optimizer.update(lossfun, *args)
        assert optimizer.t == 2
        comm.check_replicas(target)
    actor = optimizer_of(model.layer, comm)  # one rank has an empty batch
    for number in range(4):
        actor.update(lambda: F.sum(discriminator(model.layer(X))) if comm.rank or number % 2  # noqa: B023
                     else chainer.Variable(np.zeros((), 'f')))
    for number in range(3):  # an update in which another model is trained, after others
        actor.update(lambda: F.sum(discriminator(model.layer(X) if number != 1 else X[:, :2])))  # noqa: B023
    generator = optimizer_of(model.layer, comm)
    comm.bcast_data(discriminator)
    for _ in range(3):
        generator.update(Critic(discriminator), model.layer(X))
    comm.check_replicas(model)


class Critic(chainer.Chain):
    """A model whose loss depends on another one through its input."""

    def __init__(self, layer):
        super().__init__()
        with self.init_scope():
            self.layer = layer

    def forward(self, x):
        return F.sum(self.layer(x))


@pytest.mark.mpi(min_size=2)
@each_case('connected', [
    lambda sent: sent,  # what functions.send returns is empty
    lambda sent: chainermn.functions.pseudo_connect(sent, chainer.Variable(np.zeros(3, 'f')))[0]])
def test_a_loss_that_is_no_scalar_but_waits_for_a_gradient(comm, connected):
    model = L.Linear(3, 2)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(1.), comm).setup(model)

    def lossfun():
        if comm.rank == 0:
            return connected(chainermn.functions.send(model(np.ones((1, 3), 'f')), comm, 1))
        if comm.rank == 1:
            return F.sum(chainermn.functions.recv(comm, 0))
        return F.sum(model(np.zeros((1, 3), 'f')))

    optimizer.update(lossfun)
    before = model.W.array.copy()
    optimizer.update(lossfun)
    # Only rank 0 has a gradient of W, of ones.
    np.testing.assert_allclose(before - model.W.array, 1 / comm.size, rtol=1e-5)
