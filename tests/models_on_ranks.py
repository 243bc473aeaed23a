"""Models whose links are on several ranks, and the same models in one process, in float64."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from chainermn.links import MultiNodeChainList

WIDTH = 4


class Part(chainer.Chain):
    """Applies a layer to the sum of its inputs; the weights depend on the name."""

    def __init__(self, name):
        super().__init__()
        seed = sum(map(ord, name))
        random = np.random.RandomState(seed)
        np.random.seed(seed)  # for the layers of derived classes
        with self.init_scope():
            self.fc = L.Linear(WIDTH, WIDTH, initialW=random.randn(WIDTH, WIDTH),
                               initial_bias=random.randn(WIDTH))

    def forward(self, *xs):
        flat = [x for y in xs for x in (y if isinstance(y, tuple) else (y,))]
        return self.outputs(F.tanh(self.fc(sum(flat[1:], flat[0]))))

    def outputs(self, y):
        return y


class Doubled(chainer.Link):
    """Has no parameters. As the first link, it therefore has no gradients to compute."""

    def __init__(self, name):
        super().__init__()

    def forward(self, x):
        return 2 * x


def chain(size, kinds=(Part,)):
    """Return a link on each rank: (name, class, rank, names of links that send its inputs)."""
    return [(f'{rank}', kinds[rank % len(kinds)], rank, [f'{rank - 1}'] if rank else None)
            for rank in range(size)]


def build(links, comm):
    """Return the list of this rank, and its links by name."""
    ranks = {name: np.int64(rank) for name, _, rank, _ in links}
    model, own = MultiNodeChainList(comm), {}
    for name, kind, rank, sources in links:
        if rank == comm.rank:
            own[name] = kind(name)
            receivers = [ranks[other] for other, *_, theirs in links
                         for source in theirs or () if source == name]
            model.add_link(own[name], None if sources is None else tuple(map(ranks.get, sources)),
                           receivers or None)
    return model, own


class OneProcess:
    """All links in one process."""

    def __init__(self, links):
        self.links = links
        self.parts = {name: kind(name) for name, kind, *_ in links}

    def __call__(self, x):
        return self.outputs(x)[self.links[-1][0]]

    def outputs(self, x):
        """Return the outputs that no link uses, by the name of the link."""
        values = {}
        for name, _, _, sources in self.links:
            arguments = [x] if sources is None else [values[source] for source in sources]
            values[name] = self.parts[name](*arguments)
        used = {source for *_, sources in self.links for source in sources or ()}
        return {name: value for name, value in values.items() if name not in used}

    def cleargrads(self):
        for part in self.parts.values():
            part.cleargrads()

    def accumulate(self, x, t, n):
        """Add up the gradients of n micro-batches, one after another; return the loss."""
        self.cleargrads()
        total = 0
        for xs, ts in zip(np.array_split(x, n), np.array_split(t, n), strict=True):
            loss = F.softmax_cross_entropy(self(xs), ts)
            loss.grad = np.array(len(xs) / len(x))
            loss.backward()
            total += loss.array * len(xs) / len(x)
        return total


def compare_gradients(own, reference, exact=False):
    """Compare the gradients of the links of this rank."""
    for name, link in own.items():
        expected = dict(reference.parts[name].namedparams())
        for path, param in link.namedparams():
            assert (param.grad is None) == (expected[path].grad is None), (name, path)
            if param.grad is not None:
                tolerance = (0, 0) if exact else (1e-10, 1e-14)
                np.testing.assert_allclose(param.grad, expected[path].grad, *tolerance,
                                           err_msg=f'{name}{path}')
