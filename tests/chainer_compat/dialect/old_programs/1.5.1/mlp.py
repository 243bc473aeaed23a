"""MLP: FunctionSet, zero_grads, weight_decay, volatile evaluation."""
from __future__ import print_function
import numpy as np
from chainer import cuda, Variable, FunctionSet, optimizers
import chainer.functions as F

batchsize = 20
n_epoch = 4
n_units = 20

rng = np.random.RandomState(0)
centers = rng.rand(10, 32)
y_all = rng.randint(0, 10, 300).astype(np.int32)
x_all = (centers[y_all] + .2 * rng.randn(300, 32)).astype(np.float32)
x_train, x_test = np.split(x_all, [200])
y_train, y_test = np.split(y_all, [200])
N, N_test = y_train.size, y_test.size

model = FunctionSet(l1=F.Linear(32, n_units),
                    l2=F.Linear(n_units, n_units),
                    l3=F.Linear(n_units, 10))


def forward(x_data, y_data, train=True):
    x = Variable(x_data, volatile=not train)
    t = Variable(y_data, volatile=not train)
    h1 = F.dropout(F.relu(model.l1(x)), train=train)
    h2 = F.dropout(F.relu(model.l2(h1)), ratio=.3, train=train)
    y = model.l3(h2)
    return F.softmax_cross_entropy(y, t), F.accuracy(y, t)


optimizer = optimizers.Adam(alpha=0.01)
optimizer.setup(model.collect_parameters())

for epoch in range(1, n_epoch + 1):
    perm = np.random.permutation(N)
    sum_loss = 0
    for i in range(0, N, batchsize):
        optimizer.zero_grads()
        loss, acc = forward(x_train[perm[i:i + batchsize]], y_train[perm[i:i + batchsize]])
        loss.backward()
        optimizer.weight_decay(0.0005)
        optimizer.update()
        sum_loss += float(cuda.to_cpu(loss.data)) * batchsize
    print('train mean loss', sum_loss / N)

    sum_loss, sum_accuracy = 0, 0
    for i in range(0, N_test, batchsize):
        loss, acc = forward(x_test[i:i + batchsize], y_test[i:i + batchsize], train=False)
        sum_loss += float(cuda.to_cpu(loss.data)) * batchsize
        sum_accuracy += float(cuda.to_cpu(acc.data)) * batchsize
    print('test mean loss', sum_loss / N_test)
    print('accuracy', sum_accuracy / N_test)
