"""Sequence labels: connectionist_temporal_classification and CRF1d, maxout, TimerHook."""
import numpy as np
import chainer
from chainer import Variable, function_hooks, optimizers
import chainer.functions as F
import chainer.links as L

rng = np.random.RandomState(0)
N, T, D, K = 8, 9, 5, 4


class Tagger(chainer.Chain):
    def __init__(self):
        super(Tagger, self).__init__(
            forward=L.LSTM(D, 6), l=L.Linear(6, K), crf=L.CRF1d(K))

    def __call__(self, xs):
        self.forward.reset_state()
        return [self.l(self.forward(F.maxout(F.concat([x, -x]), 2))) for x in xs]


model = Tagger()
optimizer = optimizers.Adam(alpha=0.05)
optimizer.setup(model)
labels = rng.randint(1, K, (N, 3)).astype('i')
x_data = [rng.randn(N, D).astype('f') for _ in range(T)]
tags = [x[:, :K].argmax(axis=1).astype('i') for x in x_data]
hook = function_hooks.TimerHook()
with hook:
    for i in range(12):
        ys = model([Variable(x) for x in x_data])
        loss = F.connectionist_temporal_classification(ys, Variable(labels), 0)
        crf = model.crf(ys, [Variable(t) for t in tags])
        model.cleargrads()
        (loss + crf).backward()
        optimizer.update()
        print('ctc', float(F.sum(loss).data))
        print('crf', float(crf.data))
assert hook.total_time() > 0
score, path = model.crf.argmax(model([Variable(x, volatile='on') for x in x_data]))
print('score', float(score.data.sum()))
print('correct', np.mean([p == t for p, t in zip(path, tags)]))
