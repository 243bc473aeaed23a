"""Messages and bytes that a rank receives for the consistency check, counted and predicted.

Run it in an environment with ChainerMN and MPI:
``python benchmarks/traffic.py [--ranks 2,4,16,32] [--svg FILE]``.

Messages are counted on real ranks, as payload without MPI's headers, on the rank that receives the
most. Times would be meaningless, because there are more ranks than cores. The model predicts
ceil(log2(ranks)) messages. It is compared with the counts, and extended to 1,024 ranks. For
comparison, an MPI_Allgather of all signatures would take signature size * (ranks - 1) bytes.
"""

import argparse
import json
import subprocess
import sys

import _rounds

RANKS = (2, 4, 16, 32)
PREDICTED = (128, 1024)
OPERATIONS = ('multi_node_mean_grad', 'barrier', 'bcast_data', 'allreduce of a float',
              'bcast of a float', 'gather of a float', 'gather_obj of a float')


def work() -> None:
    """On each rank: count the messages of each operation. Rank 0 prints the largest counts."""
    import chainer
    import numpy as np
    from mpi4py import MPI

    import chainermn
    from chainermn._operations import call_signature

    comm = chainermn.create_communicator('naive')
    model = chainer.links.Linear(10, 10)
    for parameter in model.params():
        parameter.grad = np.ones_like(parameter.array)
    x = np.ones(1, 'f')
    calls = dict(zip(OPERATIONS, (
        lambda: comm.multi_node_mean_grad(model), comm.barrier, lambda: comm.bcast_data(model),
        lambda: comm.allreduce(x), lambda: comm.bcast(x), lambda: comm.gather(x),
        lambda: comm.gather_obj(1.5)), strict=True))
    exchange, received = comm._context.check.exchange, []
    exchange._share = None  # send messages, as between hosts, instead of using shared memory
    mpi_comm, status = comm._context.check.mpi_comm, MPI.Status()

    def counted(message, dest, source):
        mpi_comm.Sendrecv(message, dest, exchange._tag, exchange._received, source, exchange._tag,
                          status)
        received.append(status.Get_count())

    exchange._swap = counted
    found = {}
    for operation, call in calls.items():
        received.clear()
        call()
        mine = len(received), sum(received)
        found[operation] = max(MPI.COMM_WORLD.allgather(mine), key=lambda counts: counts[1])
    if comm.rank == 0:
        print(json.dumps([call_signature.SIZE, call_signature.IDENTIFIER_SIZE, found]), flush=True)


def count(ranks: int) -> tuple[int, int, dict[str, tuple[int, int]]]:
    """Return the sizes of a signature and an identifier, and messages and bytes by operation."""
    done = subprocess.run(
        _rounds.local(ranks)([sys.executable, '-W', 'ignore', __file__, '--work', 'count']),
        stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def messages(ranks: int) -> int:
    """Return the number of messages of a check, as predicted by the model."""
    return (ranks - 1).bit_length()


def main() -> None:
    """Count messages and bytes, and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--ranks', default=','.join(map(str, RANKS)), help='default: %(default)s')
    parser.add_argument('--quick', action='store_true', help='only 2 and 3 ranks, as a test')
    parser.add_argument('--svg', metavar='FILE', help='plot the bytes of a check (matplotlib)')
    parser.add_argument('--work', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work()
        return
    sizes = [2, 3] if args.quick else [int(n) for n in args.ranks.split(',')]
    counts = {n: count(n) for n in sizes}
    signature, identifier, _ = counts[sizes[0]]

    gradients = OPERATIONS[0]
    model = {n: identifier * messages(n) for n in (*sizes, *PREDICTED)}
    _rounds.table(
        ['ranks', 'bytes counted', 'bytes predicted', 'bytes of all signatures'],
        ([n, counts[n][2][gradients][1] if n in counts else None, model[n], signature * (n - 1)]
         for n in model), f'{gradients}, at the rank that receives the most')
    _rounds.table(['operation', *(f'{n} ranks' for n in sizes)],
                  ([operation, *(counts[n][2][operation][1] for n in sizes)]
                   for operation in OPERATIONS), 'Bytes of the consistency check, by operation')
    worst = max(abs(counts[n][2][gradients][1] / model[n] - 1) for n in sizes)
    print(f'counted over model: at most {1 + worst:.3f} times; at 1,024 ranks {model[1024]} bytes; '
          'goal 64')
    if args.svg:
        _rounds.chart(args.svg, 'Consistency check of gradients', 'bytes that a rank receives', {
            _rounds.V8: {f'{n:,} ranks': [n_bytes] for n, n_bytes in model.items()}}, is_log=True)


if __name__ == '__main__':
    main()
