"""Language model: F.lstm with a dict of states, truncated backprop, clip_grads."""
import math
import numpy as np
from chainer import FunctionSet, Variable, optimizers
import chainer.functions as F

n_vocab, n_units, batchsize, bprop_len = 15, 8, 4, 5
xp = np
words = np.cumsum(np.random.RandomState(0).randint(1, 4, 200)) % n_vocab
train_data = words[:160].astype(np.int32)
valid_data = words[160:].astype(np.int32)

model = FunctionSet(embed=F.EmbedID(n_vocab, n_units),
                    l1_x=F.Linear(n_units, 4 * n_units),
                    l1_h=F.Linear(n_units, 4 * n_units),
                    l2_x=F.Linear(n_units, 4 * n_units),
                    l2_h=F.Linear(n_units, 4 * n_units),
                    l3=F.Linear(n_units, n_vocab))
for param in model.parameters:
    param[:] = np.random.uniform(-0.1, 0.1, param.shape)


def forward_one_step(x_data, y_data, state, train=True):
    x = Variable(x_data, volatile=not train)
    t = Variable(y_data, volatile=not train)
    h0 = model.embed(x)
    h1_in = model.l1_x(F.dropout(h0, train=train)) + model.l1_h(state['h1'])
    c1, h1 = F.lstm(state['c1'], h1_in)
    h2_in = model.l2_x(F.dropout(h1, train=train)) + model.l2_h(state['h2'])
    c2, h2 = F.lstm(state['c2'], h2_in)
    y = model.l3(F.dropout(h2, train=train))
    return {'c1': c1, 'h1': h1, 'c2': c2, 'h2': h2}, F.softmax_cross_entropy(y, t)


def make_initial_state(batchsize=batchsize, train=True):
    return {name: Variable(np.zeros((batchsize, n_units), dtype=np.float32), volatile=not train)
            for name in ('c1', 'h1', 'c2', 'h2')}


def evaluate(dataset):
    state, total = make_initial_state(batchsize=1, train=False), 0
    for i in range(dataset.size - 1):
        state, loss = forward_one_step(dataset[i:i + 1], dataset[i + 1:i + 2], state, train=False)
        total += loss.data.reshape(())
    return math.exp(float(total) / (dataset.size - 1))


optimizer = optimizers.SGD(lr=1.)
optimizer.setup(model.collect_parameters())
state = make_initial_state()
accum_loss = Variable(np.zeros((), dtype=np.float32))
jump = train_data.size // batchsize
for i in range(60):
    x_batch = np.array([train_data[(jump * j + i) % train_data.size] for j in range(batchsize)])
    y_batch = np.array([train_data[(jump * j + i + 1) % train_data.size] for j in range(batchsize)])
    state, loss_i = forward_one_step(x_batch, y_batch, state)
    accum_loss += loss_i
    if (i + 1) % bprop_len == 0:
        print(accum_loss.data)
        optimizer.zero_grads()
        accum_loss.backward()
        accum_loss.unchain_backward()
        accum_loss = Variable(np.zeros((), dtype=np.float32))
        optimizer.clip_grads(5.)
        optimizer.update()
print('perplexity', evaluate(valid_data))
