"""Large messages over a slow link take longer than the detection of deadlocks."""

import sys
import time

import numpy as np

import chainermn

comm = chainermn.create_communicator('naive')
large = np.ones(int(sys.argv[1]) >> 2, np.float32)
other = 1 - comm.rank

# Both send, while their requests receive.
request = comm.irecv(other, 0)
comm.send(large, other, 0)
assert request.wait().sum() == large.size

# One request receives while the rank waits for another message.
if comm.rank == 0:
    comm.send(large, other, 1)
    comm.send(np.ones(1), other, 2)
else:
    request = comm.irecv(other, 1)
    comm.recv(other, 2)
    assert request.wait().sum() == large.size

# A collective waits for the sender.
if comm.rank == 0:
    comm.send(large, other, 3)
else:
    request = comm.irecv(other, 3)
    time.sleep(1)  # until the sender has announced it
    request.test()
comm.barrier()
if comm.rank == 1:
    assert request.wait().sum() == large.size
print('finished', flush=True)
