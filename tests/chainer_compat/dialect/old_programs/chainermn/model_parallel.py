"""Model-parallel network: functions.send, functions.recv, create_empty_dataset."""
import numpy as np
import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import chainermn.functions


class First(chainer.Chain):
    """The first and the last layer, on rank 0."""

    def __init__(self, comm):
        super(First, self).__init__(l1=L.Linear(6, 8), l4=L.Linear(8, 3))
        self.comm = comm

    def __call__(self, x, t):
        h = F.relu(self.l1(x))
        phi = chainermn.functions.send(h, self.comm, rank=1)
        h = chainermn.functions.recv(self.comm, rank=1, delegate_variable=phi)
        self.loss = F.softmax_cross_entropy(self.l4(h), t)
        return self.loss


class Second(chainer.Chain):
    """Two layers between them, on rank 1."""

    def __init__(self, comm):
        super(Second, self).__init__(l2=L.Linear(8, 10), l3=L.Linear(10, 8))
        self.comm = comm

    def __call__(self):
        h = chainermn.functions.recv(self.comm, rank=0)
        h = F.tanh(self.l3(F.relu(self.l2(h))))
        phi = chainermn.functions.send(h, self.comm, rank=0)
        return phi


comm = chainermn.create_communicator('naive')
rng = np.random.RandomState(0)
x = rng.randn(60, 6).astype('f')
t = x[:, :3].argmax(axis=1).astype('i')
model = First(comm) if comm.rank == 0 else Second(comm)
optimizer = chainer.optimizers.Adam(0.02)
optimizer.setup(model)
data = chainer.datasets.TupleDataset(x, t)
if comm.rank == 1:
    data = chainermn.datasets.create_empty_dataset(data)
iterator = chainer.iterators.SerialIterator(data, 12, shuffle=False)
while iterator.epoch < 3:
    batch = iterator.next()
    if comm.rank == 0:
        optimizer.update(model, *chainer.dataset.concat_examples(batch))
        print(float(model.loss.data))
    else:
        optimizer.update(model)
