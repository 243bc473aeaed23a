"""REINFORCE with a baseline: F.select_item, learning rate decay by hand."""
import numpy as np
import chainer
from chainer import Variable, optimizers
import chainer.functions as F
import chainer.links as L


class Policy(chainer.Chain):
    def __init__(self):
        super(Policy, self).__init__()
        self.add_link('hidden', L.Linear(2, 8))
        self.add_link('pi', L.Linear(8, 3))
        self.add_link('v', L.Linear(8, 1))

    def __call__(self, x):
        h = F.tanh(self.hidden(x))
        return self.pi(h), self.v(h)


def episode(policy, length=8):
    state = np.random.uniform(-1, 1, 2).astype('f')
    log_probs, entropies, values, rewards = [], [], [], []
    for _ in range(length):
        logits, value = policy(Variable(state[None]))
        prob = F.softmax(logits)
        action = np.searchsorted(np.cumsum(prob.data[0]), np.random.rand() * 0.999)
        log_prob = F.log_softmax(logits)
        log_probs.append(F.select_item(log_prob, Variable(np.array([action], 'i'))))
        entropies.append(-F.sum(prob * log_prob))
        values.append(F.reshape(value, ()))
        state = np.clip(state + 0.3 * np.array([action - 1, 0], 'f'), -1, 1)
        rewards.append(-abs(float(state[0] - state[1])))
    return log_probs, entropies, values, rewards


policy = Policy()
optimizer = optimizers.RMSprop(lr=0.02, alpha=0.99)
optimizer.setup(policy)
optimizer.add_hook(chainer.optimizer.GradientClipping(2))
for i in range(20):
    log_probs, entropies, values, rewards = episode(policy)
    total, loss = 0, 0
    for log_prob, entropy, value, reward in reversed(list(zip(
            log_probs, entropies, values, rewards))):
        total = reward + 0.9 * total
        advantage = float(total - value.data)
        loss += -F.sum(log_prob) * advantage - 0.01 * entropy + (value - total) ** 2 * 0.5
    policy.cleargrads()
    loss.backward()
    optimizer.update()
    optimizer.lr *= 0.98
    print(float(loss.data))
