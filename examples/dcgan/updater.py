"""One step of both networks, each with its own optimizer."""

import chainer
import chainer.functions as F
from chainer import training


class DCGANUpdater(training.updaters.StandardUpdater):
    """Trains the discriminator, then the generator.

    (MN) Each update of a multi-node optimizer averages gradients, so all processes must update the
    two networks in the same order. They do, because all of them run this code.
    """

    def loss_dis(self, discriminator, real, drawn):
        """Return a loss that is low if real images score high and generated images score low."""
        loss = F.mean(F.softplus(-discriminator(real))) + F.mean(F.softplus(discriminator(drawn)))
        chainer.report({'loss': loss}, discriminator)
        return loss

    def loss_gen(self, generator, discriminator, drawn):
        """Return a loss that is low if generated images score high."""
        loss = F.mean(F.softplus(-discriminator(drawn)))
        chainer.report({'loss': loss}, generator)
        return loss

    def update_core(self):
        gen_optimizer = self.get_optimizer('gen')
        dis_optimizer = self.get_optimizer('dis')
        generator, discriminator = gen_optimizer.target, dis_optimizer.target

        real = self.converter(self.get_iterator('main').next(), self.device)
        drawn = generator(generator.noise(len(real)))
        # Pass an array, so that the discriminator's loss has no gradient for the generator.
        dis_optimizer.update(self.loss_dis, discriminator, real, drawn.array)
        # This also leaves gradients in the discriminator. Its next update clears them first.
        gen_optimizer.update(self.loss_gen, generator, discriminator, drawn)
