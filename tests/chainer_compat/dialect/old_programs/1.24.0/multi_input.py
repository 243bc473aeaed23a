"""Two inputs and two losses: dict batches, noise as a Variable, subclass of Evaluator."""
import numpy as np
import chainer
from chainer import reporter as reporter_module
from chainer import training
import chainer.functions as F
import chainer.links as L
from chainer.training import extensions


class TwoTower(chainer.Chain):
    def __init__(self):
        super(TwoTower, self).__init__(
            words=L.EmbedID(10, 5), image=L.Linear(6, 5),
            merge=L.Linear(10, 8), label=L.Linear(8, 3), score=L.Linear(8, 1))
        self.train = True

    def __call__(self, word, image, label, score):
        xp = chainer.cuda.get_array_module(image.data)
        if self.train:
            noise = np.random.normal(0, 0.1, image.data.shape)
            image += chainer.Variable(xp.asarray(noise, dtype='f'), volatile=image.volatile)
        h = F.concat([F.sum(self.words(word), axis=1), F.relu(self.image(image))])
        h = F.dropout(F.relu(self.merge(h)), train=self.train)
        loss_label = F.softmax_cross_entropy(self.label(h), label)
        loss_score = F.mean_absolute_error(self.score(h)[:, 0], score)
        loss = loss_label + 0.5 * loss_score
        reporter_module.report({'label': loss_label, 'score': loss_score, 'loss': loss}, self)
        return loss


class TestModeEvaluator(extensions.Evaluator):
    def evaluate(self):
        model = self.get_target('main')
        model.train = False
        ret = super(TestModeEvaluator, self).evaluate()
        model.train = True
        return ret


class DictDataset(chainer.dataset.DatasetMixin):
    def __init__(self, n, seed):
        rng = np.random.RandomState(seed)
        self.word = rng.randint(10, size=(n, 3)).astype('i')
        self.image = rng.randn(n, 6).astype('f')
        self.label = (self.word.sum(axis=1) % 3).astype('i')
        self.score = (self.image.sum(axis=1) / 6).astype('f')

    def __len__(self):
        return len(self.word)

    def get_example(self, i):
        return {name: getattr(self, name)[i] for name in ('word', 'image', 'label', 'score')}


model = TwoTower()
optimizer = chainer.optimizers.Adam(alpha=0.01)
optimizer.setup(model)
train_iter = chainer.iterators.SerialIterator(DictDataset(60, 0), 10, shuffle=False)
test_iter = chainer.iterators.SerialIterator(DictDataset(20, 1), 10, repeat=False, shuffle=False)
updater = training.StandardUpdater(train_iter, optimizer)
trainer = training.Trainer(updater, (3, 'epoch'), out='.')
trainer.extend(TestModeEvaluator(test_iter, model), trigger=(1, 'epoch'))
trainer.extend(extensions.LogReport(log_name=None))
trainer.extend(extensions.PrintReport(['main/label', 'main/loss']))
trainer.extend(extensions.PrintReport(['validation/main/label', 'validation/main/loss']))
trainer.run()
