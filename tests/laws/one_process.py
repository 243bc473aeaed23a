"""Reference results: one process that follows the definition of a multi-node optimizer.

It computes the gradients of all ranks one after another with a single model, averages them with
NumPy in float64, and updates the model with Chainer's optimizer.
"""

import copy

import chainer
import numpy as np
from laws.programs import COMPRESSIONS, Net

#: Tolerances for float16, float32 and float64, relative to the largest element of a parameter.
TOLERANCES = {'e': 3e-2, 'f': 2e-4, 'd': 1e-8}
#: Additional tolerances, by compression that rounds gradients.
ROUNDING = {'fp16': 2e-2, 'bf16': .15}


def arrays(model):
    return {path: param.array.copy() for path, param in sorted(model.namedparams())
            if param.array is not None}


class Reference:
    """One process that does the work of all ranks, with gradients without the loss scale.

    It copies each gradient and uses only Chainer's own kernels and updates.
    """

    def __init__(self, program, size):
        self.program, self.size = program, size
        self.model = Net(program, 0)
        self.optimizer = program.create().setup(self.model)
        program.configure(self.optimizer)
        self.set_up()

    def set_up(self):
        """Discard the gradients and residuals that have not been sent."""
        self.compressor = {'fp16': Rounding(to_float16), 'bf16': Rounding(to_bfloat16),
                           '2bit': TwoBit(), 'powersgd': PowerSGD(),
                           '': Rounding(np.asarray)}[self.program.compression]
        self.is_fresh = True  # the next update broadcasts
        self.sums = []  # accumulated updates: the gradients of all ranks, and the active ranks
        self.sent = None  # the means for the next step, with double buffering

    def update(self, number, active=None, is_last=False, counts_active=False):
        """Update once.

        Args:
            number: The number of the update, which determines the batches.
            active: The ranks that have a batch; all ranks by default.
            is_last: Whether to step even if the accumulation is incomplete.
            counts_active: Whether to average only over ranks and updates that had a batch.
        """
        active = {*range(self.size)} if active is None else active
        program = self.program
        with chainer.using_config('use_torch', 'never'), \
                chainer.using_config('fused_updates', 'never'):
            gradients = [self.gradients(number, rank, rank in active)
                         for rank in range(self.size)]
            if self.is_fresh:
                self.is_fresh, self.sums, self.sent = False, [], None
            else:
                self.sums.append((gradients, active))
            if not self.sums or (len(self.sums) < program.n_accumulations and not is_last):
                return
            counts = [sum(rank in active for _, active in self.sums) for rank in range(self.size)]
            own = [{path: sum(each[rank][path] for each, _ in self.sums) / (
                max(n, 1) if counts_active else program.n_accumulations)
                for path in gradients[0]} for rank, n in enumerate(counts)]
            self.sums = []
            before = copy.deepcopy(self.compressor)
            means = {path: self.compressor.mean(path, [each[path] for each in own])
                     for path in own[0]}
            for path, mean in means.items():  # 2-bit codes represent no infinities
                means[path] = np.where(
                    np.isfinite(sum(each[path] for each in own)), mean, np.nan)
            if counts_active:
                factor = self.size / sum(map(bool, counts))
                means = {path: mean * factor for path, mean in means.items()}
            if program.mode == 'double buffering':
                self.sent, means = means, self.sent
            if means is not None:
                for path, param in self.model.namedparams(include_uninit=False):
                    param.grad = np.array(means[path]).astype(param.dtype)
                    param._loss_scale = None
                self.optimizer.update()
                if self.optimizer._loss_scaling_isnan and program.mode != 'double buffering':
                    self.compressor = before  # nothing was sent

    def gradients(self, number, rank, is_active):
        """Return the gradients of a rank, in float64."""
        self.model.cleargrads()
        scale = self.optimizer._loss_scale
        if is_active:
            loss = self.model(*self.program.batch(number, rank, self.size))
            loss.backward(loss_scale=scale)
        return {path: np.zeros(param.shape) if param.grad is None
                else param.grad.astype('d') / (scale or 1)
                for path, param in sorted(self.model.namedparams()) if param.is_initialized}


class Rounding:
    def __init__(self, rounded):
        self.rounded = rounded

    def mean(self, path, own):
        return self.rounded(np.mean([self.rounded(x) for x in own], 0))


def to_float16(x):
    with np.errstate(over='ignore'):
        return x.astype('e').astype('d')


def to_bfloat16(x):
    scale = 2. ** (np.frexp(x)[1] - 8)  # 8 significant bits
    return np.round(x / scale) * scale


class TwoBit:
    """2-bit compression, written from the docstring of the compressor."""

    def __init__(self):
        self.threshold = COMPRESSIONS['2bit'].threshold
        self.residuals = {}

    def mean(self, path, own):
        sent = []
        for rank, x in enumerate(own):
            residual = self.residuals.get((path, rank), 0)
            value = x + residual
            sent.append(self.threshold * ((value >= self.threshold) * 1.
                                          - (value <= -self.threshold)))
            self.residuals[path, rank] = np.where(np.isfinite(x), value - sent[-1], residual)
        return np.mean(sent, 0)


class PowerSGD:
    """PowerSGD, written from the docstring of the compressor."""

    def __init__(self):
        self.rank = COMPRESSIONS['powersgd'].rank
        self.errors, self.q = {}, {}

    def mean(self, path, own):
        n = len(own[0]) if own[0].ndim > 1 else 0
        if not n or own[0].size < 2 * self.rank * (n + own[0].size // n):
            return np.mean(own, 0)
        matrices = [x.reshape(n, -1) + self.errors.get((path, rank), 0)
                    for rank, x in enumerate(own)]
        q = self.q.get(path)
        if q is None:
            q = np.random.RandomState(n * 65537 % 2**32).standard_normal(
                (matrices[0].shape[1], self.rank))
        p, _ = np.linalg.qr(np.mean([m @ q for m in matrices], 0))
        q = np.mean([m.T @ p for m in matrices], 0)
        if np.isfinite(q).all():
            self.q[path] = q
            self.errors |= {(path, rank): m - p @ q.T for rank, m in enumerate(matrices)}
        return (p @ q.T).reshape(own[0].shape)


