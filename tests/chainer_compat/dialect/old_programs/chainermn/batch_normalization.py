"""MultiNodeBatchNormalization, broadcast_data, allreduce_grad, MultiNodeChainList."""
import numpy as np
import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
from chainermn.links import MultiNodeBatchNormalization


class Net(chainer.Chain):
    def __init__(self, comm):
        super(Net, self).__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(1, 4, 3, nobias=True)
            self.bn = MultiNodeBatchNormalization(4, comm)
            self.fc = L.Linear(4 * 4 * 4, 3)

    def __call__(self, x):
        return self.fc(F.relu(self.bn(self.conv(x))))


class Last(chainermn.MultiNodeChainList):
    """Rank 0 has the first layer, rank 1 the second."""

    def __init__(self, comm):
        super(Last, self).__init__(comm=comm)
        if comm.rank == 0:
            self.add_link(L.Linear(36, 3), rank_in=None, rank_out=1)
        else:
            self.add_link(L.Linear(3, 2), rank_in=0, rank_out=None)


comm = chainermn.create_communicator('naive')
rng = np.random.RandomState(0)
t = rng.randint(3, size=48).astype('i')
x = (rng.rand(3, 1, 6, 6)[t] + 0.3 * rng.randn(48, 1, 6, 6)).astype('f')
x, t = x[comm.rank::comm.size], t[comm.rank::comm.size]
model = Net(comm)
optimizer = chainer.optimizers.MomentumSGD(0.1)
optimizer.setup(model)
comm.broadcast_data(model)
for i in list(range(0, 24, 8)) * 4:
    model.cleargrads()
    loss = F.softmax_cross_entropy(model(x[i:i + 8]), t[i:i + 8])
    loss.backward()
    comm.allreduce_grad(model)
    optimizer.update()
    mean = comm.mpi_comm.allreduce(float(loss.data)) / comm.size
    if comm.rank == 0:
        print(mean)

last = Last(comm)
optimizer.setup(last)
if comm.rank == 0:
    last(x[:8])
    print(comm.mpi_comm.recv(source=1))
else:
    comm.mpi_comm.send(float(F.sum(last() ** 2).data), dest=0)
