"""A custom all-reduce on a ring of processes, with isend and irecv.

    mpiexec -n 4 python ring_allreduce.py

Each process sends to its right neighbor and receives from its left neighbor. The array is split
into one chunk per process. The first round sums each chunk, and the second round distributes the
sums. So with n processes, each process sends 2 (n - 1) / n times the size of the array (Patarasuk
and Yuan, 2009).
"""

import argparse
import time

import numpy as np

import chainermn


def ring_allreduce(comm, x):
    """Return the sum of the arrays of all processes. It is bitwise identical on all of them."""
    total = x.copy()
    chunks = np.array_split(total.reshape(-1), comm.size)  # views of the total
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    for add in (True, False):
        # After the first round, this process has the complete sum of chunk rank + 1.
        first = comm.rank + (0 if add else 1)
        for step in range(comm.size - 1):
            received = comm.irecv(left)
            comm.isend(chunks[(first - step) % comm.size], right).wait()
            chunk = chunks[(first - step - 1) % comm.size]
            chunk[...] = received.wait() + (chunk if add else 0)
    return total


def main():
    """Compare with the communicator's all-reduce. Every process runs this function."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument('--size', type=int, default=1_000_000,
                        help='number of elements in the array')
    parser.add_argument('--repeat', type=int, default=5, help='number of measurements')
    args = parser.parse_args()
    comm = chainermn.create_communicator('flat')
    x = np.random.RandomState(comm.rank).uniform(-1, 1, args.size).astype(np.float32)

    def seconds_of(allreduce):
        comm.barrier()
        start = time.perf_counter()
        allreduce(x)
        return comm.allreduce_obj(time.perf_counter() - start, 'max')

    difference = np.abs(ring_allreduce(comm, x) - comm.allreduce(x)).max(initial=0)
    ours, theirs = zip(*((seconds_of(lambda x: ring_allreduce(comm, x)), seconds_of(comm.allreduce))
                         for _ in range(args.repeat)), strict=True)
    if comm.rank == 0:
        print(f'{comm.size} processes, {args.size} numbers each')
        print(f'largest difference from allreduce: {difference:.1e}')
        print(f'time: {np.median(ours) / np.median(theirs):.1f} times that of allreduce')


if __name__ == '__main__':
    main()
