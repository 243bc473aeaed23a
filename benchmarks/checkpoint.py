"""How long saving a checkpoint blocks training, compared with ChainerMN 7 and with a plain copy.

Run it in an environment with ChainerMN and MPI, for a model of 100 MB on each rank:
``python benchmarks/checkpoint.py [--ranks 2] [--rounds 9] [--folder-of-files DIR] [--png FILE]``.

- call: duration of the call that saves, on the slowest rank.
- added: time that a checkpoint adds to the following steps; ours writes in a background thread.

Both show the ratio of ours to ChainerMN 7 within a round (median, minimum and maximum); for the
call also the ratio to a plain copy of the model's arrays, which is a lower bound.  ChainerMN 7
compresses its files (weights hardly get smaller), ours does not.
"""

import os
import statistics
import tempfile
import time

import _rounds

GOAL = .1  # times the old one
COPY = 1.2  # times a copy; it also compares calls with the other ranks and starts a thread
LAYERS, WIDTH = 4, int(os.environ.get('CHECKPOINT_WIDTH', 2500))
STEPS = 10


def work(kind: str, folder: str) -> None:
    """In a process: takes turns of a copy, of steps, or of a checkpoint and steps."""
    import chainer
    import numpy as np
    from mpi4py import MPI

    import chainermn

    assert (kind == 'old') != chainermn.__version__.startswith('8.'), chainermn.__file__
    world = MPI.COMM_WORLD
    model = chainer.Sequential(*(chainer.links.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = chainer.optimizers.SGD(1e-12).setup(model)
    x = np.random.RandomState(world.rank).rand(16, WIDTH).astype(np.float32)
    files = tempfile.mkdtemp(dir=os.environ['CHECKPOINT_FILES'])
    checkpointer = chainermn.create_multi_node_checkpointer(
        'run', chainermn.create_communicator('naive'), cp_interval=1, path=files)
    how = {} if kind == 'old' else {'wait': False}
    iteration = 0

    def slowest(start: float) -> float:
        return world.allreduce(time.perf_counter() - start, MPI.MAX)

    def turn(what: str) -> list[float]:
        nonlocal iteration
        world.Barrier()
        start = time.perf_counter()
        if what == 'copy':
            seconds = []
            for _ in range(3):  # the first may wait for memory
                world.Barrier()
                start = time.perf_counter()
                copies = [param.array.copy() for param in model.params()]
                seconds.append(slowest(start))
                del copies
            return [statistics.median(seconds)]
        call = 0.
        if what == 'save':
            iteration += 1
            checkpointer.save(model, iteration, **how)
            call = time.perf_counter() - start
        for _ in range(STEPS):
            optimizer.update(lambda: chainer.functions.sum(model(x)))
        total = slowest(start)
        if kind == 'ours':
            from chainermn.extensions._checkpointing.background import wait_for_all

            wait_for_all()  # so that it does not run into another's turn
        written = slowest(start)
        return [world.allreduce(call, MPI.MAX), total, written]

    _rounds.answer(kind, folder, world.rank, turn)
    checkpointer.finalize()
    world.Barrier()
    os.rmdir(files)


def main() -> None:
    """Measures and prints."""
    parser = _rounds.parser(__doc__, rounds=9, ranks=2)
    parser.add_argument('--folder-of-files', metavar='DIR', help='folder on the disk to measure')
    args = parser.parse_args()
    if args.work:
        work(args.work, args.folder)
        return
    if args.quick:
        args.rounds = 1
        os.environ['CHECKPOINT_WIDTH'] = '100'
    call: dict[str, list[float]] = {'ours': [], 'old': [], 'copy': []}
    added: dict[str, list[float]] = {'ours': [], 'old': []}
    written, steps = [], []
    with tempfile.TemporaryDirectory(dir=args.folder_of_files) as files:
        os.environ['CHECKPOINT_FILES'] = files
        with _rounds.groups(__file__, args.ranks) as groups:
            for n in range(-1, args.rounds):
                for kind in ('ours', 'old') if n % 2 else ('old', 'ours'):
                    _, alone, _ = groups[kind].ask('steps')
                    copy, = groups[kind].ask('copy')
                    blocked, total, end = groups[kind].ask('save')
                    if n < 0:
                        continue  # warms up
                    call[kind].append(blocked)
                    added[kind].append(total - alone)
                    if kind == 'ours':
                        call['copy'].append(copy)
                        written.append(end)
                        steps.append(alone)
    width = int(os.environ.get('CHECKPOINT_WIDTH', WIDTH))
    size = LAYERS * (width + 1) * width * 4 / 1e6
    print(f'{size:.0f} MB on each of {args.ranks} ranks, {args.rounds} rounds')
    print(_rounds.show('call', call['ours'], call['old'], GOAL))
    print(_rounds.show(f'added to {STEPS} steps', added['ours'], added['old'], GOAL))
    each = _rounds.ratios(call['ours'], call['copy'])
    print(f'call against a copy: {statistics.median(call["copy"]) * 1e3:.3f} ms, '
          f'{statistics.median(each):.3f} ({min(each):.3f} to {max(each):.3f}) times; '
          f'goal {COPY:g}')
    print(f'{STEPS} steps without: {statistics.median(steps) * 1e3:.0f} ms; on the disk after '
          f'{statistics.median(written) * 1e3:.0f} ms;', _rounds.load())
    if args.png:
        _rounds.draw(args.png, f'A checkpoint of {size:.0f} MB', {
            'call': _rounds.ratios(call['ours'], call['old']),
            'added': _rounds.ratios(added['ours'], added['old'])}, GOAL)


if __name__ == '__main__':
    main()
