"""Sequential: link hooks, function hooks, AMSGrad, hooks after the update."""
import collections
import numpy as np
import chainer
import chainer.functions as F
import chainer.links as L
from chainer import Sequential


class CountHook(chainer.LinkHook):
    name = 'Count'

    def __init__(self):
        self.calls = collections.Counter()

    def forward_preprocess(self, args):
        self.calls[args.link.__class__.__name__] += 1

    def forward_postprocess(self, args):
        assert args.out is not None


class FlopsHook(chainer.FunctionHook):
    name = 'Flops'
    forward = backward = 0

    def forward_postprocess(self, function, in_data):
        self.forward += sum(x.size for x in in_data if x is not None)

    def backward_postprocess(self, function, in_data, out_grad):
        self.backward += 1


class Model(chainer.Chain):
    def __init__(self):
        super(Model, self).__init__()
        block = Sequential(L.Linear(8, 8, nobias=True), L.BatchNormalization(8), F.relu)
        with self.init_scope():
            self.blocks = block.repeat(2)
            self.head = Sequential(L.Linear(8, 6), F.elu, lambda x: F.dropout(x, 0.1),
                                   L.Linear(6, 3))

    def forward(self, x):
        return self.head(self.blocks(x) + x)


rng = np.random.RandomState(0)
x = rng.randn(60, 8).astype('f')
t = x[:, :3].argmax(axis=1).astype('i')
model = Model()
optimizer = chainer.optimizers.Adam(alpha=0.01, amsgrad=True).setup(model)
optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(1e-3), timing='post')
optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(1.0), timing='pre')
count, flops = CountHook(), FlopsHook()
with count, flops:
    for i in range(0, 60, 6):
        loss = F.softmax_cross_entropy(model(x[i:i + 6]), t[i:i + 6])
        model.cleargrads()
        loss.backward()
        optimizer.update()
        print(loss.item() if hasattr(loss, 'item') else float(loss.array))
print('linear', count.calls['Linear'])
print('sequential', count.calls['Sequential'])
with chainer.using_config('train', False):
    print('test', float(F.softmax_cross_entropy(model(x), t).array))
print('layers', len(model.blocks.flatten()))
