"""One step of both networks, each with its own optimizer."""

import chainer
import chainer.functions as F
from chainer import training


class DCGANUpdater(training.updaters.StandardUpdater):
    """Trains the discriminator, then the generator.

    (MN) With multi-node optimizers each update exchanges gradients, which all processes have to
    do in the same order. They do, as all of them run this.
    """

    def loss_dis(self, discriminator, real, drawn):
        """Is low if real images have high scores and drawn ones low scores."""
        loss = F.mean(F.softplus(-discriminator(real))) + F.mean(F.softplus(discriminator(drawn)))
        chainer.report({'loss': loss}, discriminator)
        return loss

    def loss_gen(self, generator, discriminator, drawn):
        """Is low if drawn images have high scores."""
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
        # This leaves gradients in the discriminator too; its next update begins by clearing them.
        gen_optimizer.update(self.loss_gen, generator, discriminator, drawn)
