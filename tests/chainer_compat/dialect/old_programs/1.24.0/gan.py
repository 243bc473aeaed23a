"""GAN with a Trainer: two optimizers, custom updater, Deconvolution2D, WeightDecay, test flags."""
import numpy as np
import chainer
from chainer import Variable, training
import chainer.functions as F
import chainer.links as L
from chainer.training import extensions


class Generator(chainer.Chain):
    def __init__(self, n_hidden, ch=4, wscale=0.02):
        self.n_hidden = n_hidden
        super(Generator, self).__init__(
            l0=L.Linear(n_hidden, 4 * 4 * ch, wscale, nobias=True),
            dc1=L.Deconvolution2D(ch, 1, 4, stride=2, pad=1, wscale=wscale),
            bn0=L.BatchNormalization(4 * 4 * ch))

    def make_hidden(self, batchsize):
        return np.random.uniform(-1, 1, (batchsize, self.n_hidden)).astype(np.float32)

    def __call__(self, z, test=False):
        h = F.relu(self.bn0(self.l0(z), test=test))
        h = F.reshape(h, (z.data.shape[0], -1, 4, 4))
        return F.sigmoid(self.dc1(h))


class Discriminator(chainer.Chain):
    def __init__(self, ch=4):
        super(Discriminator, self).__init__(
            c0=L.Convolution2D(1, ch, 4, stride=2, pad=1, nobias=True),
            bn0=L.BatchNormalization(ch, use_gamma=False),
            l1=L.Linear(4 * 4 * ch, 1))

    def __call__(self, x, test=False):
        h = F.leaky_relu(self.bn0(self.c0(x), test=test))
        h = F.dropout(h, 0.2, train=not test)
        return self.l1(h)


class GANUpdater(training.StandardUpdater):
    def __init__(self, *args, **kwargs):
        self.gen, self.dis = kwargs.pop('models')
        super(GANUpdater, self).__init__(*args, **kwargs)

    def update_core(self):
        gen_optimizer = self.get_optimizer('gen')
        dis_optimizer = self.get_optimizer('dis')
        batch = self.get_iterator('main').next()
        x_real = Variable(self.converter(batch, self.device))
        y_real = self.dis(x_real)
        x_fake = self.gen(Variable(self.gen.make_hidden(len(batch))))
        y_fake = self.dis(x_fake)
        loss_gen = F.sum(F.softplus(-y_fake)) / len(batch)
        loss_dis = F.sum(F.softplus(-y_real) + F.softplus(y_fake)) / len(batch)
        chainer.report({'loss': loss_gen}, self.gen)
        chainer.report({'loss': loss_dis}, self.dis)
        self.gen.cleargrads()
        loss_gen.backward()
        gen_optimizer.update()
        x_fake.unchain_backward()
        self.dis.cleargrads()
        loss_dis.backward()
        dis_optimizer.update()


def sample(gen):
    @training.make_extension(trigger=(4, 'iteration'))
    def make_image(trainer):
        state = np.random.get_state()
        np.random.seed(0)
        z = Variable(gen.make_hidden(3), volatile='on')
        print('sample', float(gen(z, test=True).data.mean()))
        np.random.set_state(state)
    return make_image


def make_optimizer(model):
    optimizer = chainer.optimizers.Adam(alpha=0.0002, beta1=0.5)
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer.WeightDecay(0.001), 'hook_dec')
    return optimizer


rng = np.random.RandomState(0)
train = [np.outer(a, b)[None].astype('f') for a, b in rng.rand(60, 2, 8)]
gen, dis = Generator(6), Discriminator()
iterator = chainer.iterators.SerialIterator(train, 10, shuffle=False)
updater = GANUpdater(models=(gen, dis), iterator=iterator, device=-1, optimizer={
    'gen': make_optimizer(gen), 'dis': make_optimizer(dis)})
trainer = training.Trainer(updater, (3, 'epoch'), out='out')
trainer.extend(sample(gen))
trainer.extend(extensions.LogReport(trigger=(1, 'iteration')))
trainer.extend(extensions.PrintReport(['iteration', 'gen/loss']), trigger=(1, 'iteration'))
trainer.extend(extensions.PrintReport(['iteration', 'dis/loss']), trigger=(1, 'iteration'))
trainer.run()
