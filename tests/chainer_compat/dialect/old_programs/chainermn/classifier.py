"""Data-parallel classifier: scatter_dataset, multi-node optimizer and evaluator, Trainer."""
import json
import numpy as np
import chainer
import chainer.functions as F
import chainer.links as L
from chainer import training
from chainer.training import extensions
import chainermn


class MLP(chainer.Chain):
    def __init__(self, n_units, n_out):
        super(MLP, self).__init__(
            l1=L.Linear(12, n_units), l2=L.Linear(n_units, n_units), l3=L.Linear(n_units, n_out))

    def __call__(self, x):
        return self.l3(F.relu(self.l2(F.relu(self.l1(x)))))


comm = chainermn.create_communicator('naive')
device = -1
model = L.Classifier(MLP(10, 4))
optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(0.02), comm)
optimizer.setup(model)
if comm.rank == 0:
    rng = np.random.RandomState(0)
    t = rng.randint(4, size=120).astype('i')
    x = (rng.rand(4, 12)[t] + 0.2 * rng.randn(120, 12)).astype('f')
    data = chainer.datasets.TupleDataset(x, t)
    train, test = data[:80], data[80:]
else:
    train, test = None, None
train = chainermn.scatter_dataset(train, comm)
test = chainermn.scatter_dataset(test, comm)
train_iter = chainer.iterators.SerialIterator(train, 10, shuffle=False)
test_iter = chainer.iterators.SerialIterator(test, 10, repeat=False, shuffle=False)
updater = training.StandardUpdater(train_iter, optimizer, device=device)
trainer = training.Trainer(updater, (4, 'epoch'), out='result')
evaluator = extensions.Evaluator(test_iter, model, device=device)
trainer.extend(chainermn.create_multi_node_evaluator(evaluator, comm))
if comm.rank == 0:
    trainer.extend(extensions.dump_graph('main/loss'))
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.PrintReport(['epoch', 'main/loss', 'main/accuracy', 'elapsed_time']),
                   trigger=(10, 'epoch'))
trainer.run()
if comm.rank == 0:
    for entry in json.load(open('result/log')):
        print(entry['validation/main/loss'])
        print(entry['validation/main/accuracy'])
