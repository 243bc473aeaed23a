"""Language model with a Trainer: custom iterator, truncated BPTT updater, L.LSTM."""
import copy
import numpy as np
import chainer
import chainer.functions as F
import chainer.links as L
from chainer import training
from chainer.training import extensions

n_vocab, n_units = 12, 8


class RNNForLM(chainer.Chain):
    def __init__(self, train=True):
        super(RNNForLM, self).__init__(
            embed=L.EmbedID(n_vocab, n_units),
            l1=L.LSTM(n_units, n_units),
            l2=L.StatelessLSTM(n_units, n_units),
            l3=L.Linear(n_units, n_vocab))
        for param in self.params():
            param.data[...] = np.random.uniform(-0.1, 0.1, param.data.shape)
        self.train = train
        self.reset_state()

    def reset_state(self):
        self.l1.reset_state()
        self.c = self.h = None

    def __call__(self, x):
        h = self.l1(F.dropout(self.embed(x), train=self.train))
        self.c, self.h = self.l2(self.c, self.h, F.dropout(h, train=self.train))
        return self.l3(F.dropout(self.h, train=self.train))


class ParallelSequentialIterator(chainer.dataset.Iterator):
    def __init__(self, dataset, batch_size, repeat=True):
        self.dataset, self.batch_size, self.repeat = dataset, batch_size, repeat
        self.epoch, self.iteration, self.is_new_epoch = 0, 0, False
        self.offsets = [i * len(dataset) // batch_size for i in range(batch_size)]

    def __next__(self):
        length = len(self.dataset)
        if not self.repeat and self.iteration * self.batch_size >= length:
            raise StopIteration
        cur = [self.dataset[(o + self.iteration) % length] for o in self.offsets]
        self.iteration += 1
        nxt = [self.dataset[(o + self.iteration) % length] for o in self.offsets]
        epoch = self.iteration * self.batch_size // length
        self.is_new_epoch = self.epoch < epoch
        if self.is_new_epoch:
            self.epoch = epoch
        return list(zip(cur, nxt))

    @property
    def epoch_detail(self):
        return self.iteration * self.batch_size / len(self.dataset)

    def serialize(self, serializer):
        self.iteration = serializer('iteration', self.iteration)
        self.epoch = serializer('epoch', self.epoch)


class BPTTUpdater(training.StandardUpdater):
    def __init__(self, train_iter, optimizer, bprop_len, device):
        super(BPTTUpdater, self).__init__(train_iter, optimizer, device=device)
        self.bprop_len = bprop_len

    def update_core(self):
        loss = 0
        train_iter = self.get_iterator('main')
        optimizer = self.get_optimizer('main')
        for i in range(self.bprop_len):
            x, t = self.converter(train_iter.__next__(), self.device)
            loss += optimizer.target(chainer.Variable(x), chainer.Variable(t))
        optimizer.target.cleargrads()
        loss.backward()
        loss.unchain_backward()
        optimizer.update()


def compute_perplexity(result):
    result['perplexity'] = np.exp(result['main/loss'])
    if 'validation/main/loss' in result:
        result['val_perplexity'] = np.exp(result['validation/main/loss'])


words = (np.cumsum(np.random.RandomState(0).randint(1, 4, 250)) % n_vocab).astype(np.int32)
train_iter = ParallelSequentialIterator(words[:200], 5)
val_iter = ParallelSequentialIterator(words[200:], 1, repeat=False)
rnn = RNNForLM()
model = L.Classifier(rnn)
model.compute_accuracy = False
optimizer = chainer.optimizers.SGD(lr=1.0)
optimizer.setup(model)
optimizer.add_hook(chainer.optimizer.GradientClipping(5))
eval_model = model.copy()
eval_rnn = eval_model.predictor
eval_rnn.train = False

trainer = training.Trainer(BPTTUpdater(train_iter, optimizer, 10, -1), (3, 'epoch'), out='result')
trainer.extend(extensions.Evaluator(
    val_iter, eval_model, device=-1, eval_hook=lambda _: eval_rnn.reset_state()))
interval = 2
trainer.extend(extensions.LogReport(postprocess=compute_perplexity,
                                    trigger=(interval, 'iteration')))
trainer.extend(extensions.PrintReport(['epoch', 'iteration', 'val_perplexity', 'perplexity']),
               trigger=(interval, 'iteration'))
trainer.extend(extensions.snapshot())
trainer.run()
rnn.reset_state()
evaluator = extensions.Evaluator(
    ParallelSequentialIterator(words[200:], 1, repeat=False), eval_model, device=-1)
print('test', float(evaluator()['main/loss']))
