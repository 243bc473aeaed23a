"""DQN in a toy environment: target network by deepcopy and copyparams, RMSpropGraves."""
import copy
import random
import numpy as np
from chainer import Chain, Variable, optimizers
import chainer.functions as F
import chainer.links as L

N = 6


class Corridor(object):
    def reset(self):
        self.position = 0
        return self.observe()

    def observe(self):
        return np.eye(N, dtype=np.float32)[self.position]

    def step(self, action):
        self.position = max(0, self.position + (1 if action else -1))
        done = self.position == N - 1
        return self.observe(), 1.0 if done else -0.01, done


class Q(Chain):
    def __init__(self):
        super(Q, self).__init__(l1=L.Linear(N, 10), q=L.Linear(10, 2, wscale=0.1))

    def __call__(self, x):
        return self.q(F.relu(self.l1(x)))


random.seed(0)
env, model = Corridor(), Q()
optimizer = optimizers.RMSpropGraves(lr=0.01, alpha=0.95, momentum=0.9, eps=0.01)
optimizer.setup(model)
target = copy.deepcopy(model)
memory, gamma, epsilon, steps = [], 0.9, 1.0, 0


def learn(batch):
    s, a, r, s_next, done = map(np.array, zip(*batch))
    q = model(Variable(s))
    max_q = target(Variable(s_next, volatile='on')).data.max(axis=1)
    y = copy.deepcopy(q.data)
    for i in range(len(batch)):
        y[i, a[i]] = np.sign(r[i]) if done[i] else r[i] + gamma * max_q[i]
    td = Variable(y) - q
    td_clip = Variable(np.clip(td.data, -0.5, 0.5))
    zero = Variable(np.zeros_like(q.data))
    loss = F.mean_squared_error(td_clip + td * 1e-6, zero) + F.mean_squared_error(td, zero) / 2
    model.zerograds()
    loss.backward()
    optimizer.update()
    return float(loss.data)


for episode in range(6):
    state, done = env.reset(), False
    for t in range(25):
        steps += 1
        epsilon = max(0.1, epsilon - 0.02)
        if random.random() < epsilon:
            action = random.randint(0, 1)
        else:
            action = int(model(Variable(state[None], volatile='on')).data.argmax())
        next_state, reward, done = env.step(action)
        memory.append((state, np.int32(action), np.float32(reward), next_state, done))
        state = next_state
        if len(memory) >= 16 and steps % 2 == 0:
            print(learn(random.sample(memory, 8)))
        if steps % 20 == 0:
            target.copyparams(model)
        if done:
            break

batch = memory[-8:]
s, a, r, _, _ = map(np.array, zip(*batch))
q = F.select_item(model(Variable(s)), Variable(a))
print('huber', float(F.sum(F.huber_loss(F.reshape(q, (-1, 1)), Variable(r[:, None]), 1.0)).data))
