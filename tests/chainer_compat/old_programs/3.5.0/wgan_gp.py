"""WGAN with gradient penalty: chainer.grad, enable_double_backprop, own updater."""
import numpy as np
import chainer
import chainer.functions as F
import chainer.links as L
from chainer import training, Variable
from chainer.training import extensions


class Net(chainer.Chain):
    def __init__(self, n_in, n_hidden, n_out):
        super(Net, self).__init__()
        with self.init_scope():
            self.l0 = L.Linear(n_in, n_hidden)
            self.l1 = L.Linear(n_hidden, n_hidden)
            self.l2 = L.Linear(n_hidden, n_out)

    def __call__(self, x):
        return self.l2(F.tanh(self.l1(F.leaky_relu(self.l0(x)))))


class Updater(training.StandardUpdater):
    def __init__(self, **kwargs):
        self.gen, self.critic = kwargs.pop('models')
        self.n_critic = kwargs.pop('n_critic')
        self.lam = 10
        super(Updater, self).__init__(**kwargs)

    def update_core(self):
        for i in range(self.n_critic):
            batch = self.get_iterator('main').next()
            x = Variable(self.converter(batch, self.device))
            n = len(batch)
            z = np.random.normal(size=(n, 3)).astype('f')
            x_fake = self.gen(z)
            e = np.random.uniform(0., 1., (n, 1)).astype('f')
            x_hat = Variable(e * x.data + (1 - e) * x_fake.data)
            grad, = chainer.grad([self.critic(x_hat)], [x_hat], enable_double_backprop=True)
            norm = F.sqrt(F.batch_l2_norm_squared(grad))
            penalty = self.lam * F.mean_squared_error(norm, np.ones_like(norm.data))
            loss = F.average(self.critic(x_fake)) - F.average(self.critic(x)) + penalty
            x_fake.unchain()
            self.critic.cleargrads()
            loss.backward()
            self.get_optimizer('critic').update()
        chainer.reporter.report({'loss/critic': loss, 'loss/penalty': penalty})
        loss_gen = -F.average(self.critic(self.gen(np.random.normal(size=(n, 3)).astype('f'))))
        self.gen.cleargrads()
        loss_gen.backward()
        self.get_optimizer('gen').update()
        chainer.reporter.report({'loss/gen': loss_gen})


rng = np.random.RandomState(0)
angle = rng.uniform(0, 6.28, 120)
data = np.array([np.cos(angle), np.sin(angle)], 'f').T
gen, critic = Net(3, 10, 2), Net(2, 12, 1)
opts = {}
for name, model in (('gen', gen), ('critic', critic)):
    opts[name] = chainer.optimizers.Adam(alpha=0.005, beta1=0, beta2=0.9)
    opts[name].setup(model)
updater = Updater(models=(gen, critic), n_critic=3, optimizer=opts,
                  iterator=chainer.iterators.SerialIterator(data, 20, shuffle=False))
trainer = training.Trainer(updater, (10, 'iteration'), out='.')
trainer.extend(extensions.LogReport(trigger=(1, 'iteration')))
for entry in ('gen', 'critic', 'penalty'):
    trainer.extend(extensions.PrintReport(['iteration', 'loss/' + entry]),
                   trigger=(1, 'iteration'))
trainer.run()
