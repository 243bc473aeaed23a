"""Sequence to sequence: LSTM encoder and decoder, volatile='auto', pickle."""
import pickle
import numpy as np
from chainer import Chain, Variable, cuda, functions, links, optimizer, optimizers

VOCAB, EMBED, HIDDEN, LENGTH, BATCH = 8, 6, 10, 5, 10
START = 0
rng = np.random.RandomState(0)
sources = rng.randint(1, VOCAB, (60, LENGTH)).astype(np.int32)


class EncoderDecoder(Chain):
    def __init__(self):
        super(EncoderDecoder, self).__init__(
            w_xi=links.EmbedID(VOCAB, EMBED),
            w_ip=links.Linear(EMBED, 4 * HIDDEN),
            w_pp=links.Linear(HIDDEN, 4 * HIDDEN),
            w_yq=links.EmbedID(VOCAB, 4 * HIDDEN),
            w_qq=links.Linear(HIDDEN, 4 * HIDDEN),
            w_qy=links.Linear(HIDDEN, VOCAB))

    def reset(self, size):
        self.zerograds()
        self.c = Variable(np.zeros((size, HIDDEN), dtype=np.float32), volatile='auto')
        self.h = Variable(np.zeros((size, HIDDEN), dtype=np.float32), volatile='auto')

    def encode(self, x):
        i = functions.tanh(self.w_xi(x))
        self.c, self.h = functions.lstm(self.c, self.w_ip(i) + self.w_pp(self.h))

    def decode(self, y):
        self.c, self.h = functions.lstm(self.c, self.w_yq(y) + self.w_qq(self.h))
        return self.w_qy(self.h)

    def forward(self, batch, train):
        volatile = 'off' if train else 'on'
        self.reset(len(batch))
        for step in range(LENGTH):
            self.encode(Variable(batch[:, step], volatile=volatile))
        y = Variable(np.full(len(batch), START, dtype=np.int32), volatile=volatile)
        loss, output = 0, []
        for step in reversed(range(LENGTH)):
            scores = self.decode(y)
            target = Variable(batch[:, step], volatile=volatile)
            loss += functions.softmax_cross_entropy(scores, target)
            output.append(cuda.to_cpu(scores.data).argmax(1))
            y = target if train else Variable(output[-1].astype(np.int32), volatile='on')
        return np.array(output).T[:, ::-1], loss


model = EncoderDecoder()
opt = optimizers.AdaGrad(lr=0.1)
opt.setup(model)
opt.add_hook(optimizer.GradientClipping(5))
for epoch in range(4):
    for i in range(0, 50, BATCH):
        output, loss = model.forward(sources[i:i + BATCH], True)
        loss.backward()
        opt.update()
        print(float(loss.data))
    pickle.dump(model, open('model.pkl', 'wb'), -1)
model = pickle.load(open('model.pkl', 'rb'))
output, loss = model.forward(sources[50:], False)
print('test', float(loss.data))
print('correct', (output == sources[50:]).mean())
