"""How long saving a checkpoint blocks training, compared with ChainerMN 7 and with a plain copy.

Run it in an environment with ChainerMN and MPI, for a model of 100 MB on each rank:
``python benchmarks/checkpoint.py [--ranks 2] [--rounds 5] [--part call] [--folder-of-files DIR]
[--svg FILE]``.

- call: duration of the call that saves, on the slowest rank.
- added: time that a checkpoint adds to the following steps; ChainerMN 8 writes in a background
  thread.

Both show the ratio to ChainerMN 7 within a round (median, minimum and maximum). For the call, the
output also shows the ratio to a plain copy of the model's arrays, which is a lower bound. ChainerMN
7 compresses its files (weights hardly get smaller), which takes most of the time of this part;
ChainerMN 8 does not. ``--part stall`` only measures the following part, in 15 seconds.

- stall: how long the training of ResNet-50 stops while its 300 MB (with Adam) are saved: the
  duration of the call, plus the time that the next update waits for copies. "step" is the time that
  the call and the next step take, minus a step without a checkpoint. The output shows the ratio of
  both to a copy of the state in memory, also if the call copies all arrays.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable

import _rounds
from _rounds import STALL, V7, V8

GOAL = .1  # relative to ChainerMN 7
COPY = 1.2  # relative to a copy; the call also checks consistency and starts a thread
LAYERS, WIDTH = 4, int(os.environ.get('CHECKPOINT_WIDTH', 2500))
STEPS = 10
STALL_GOAL = .5  # relative to a copy


def work_on_stall(kind: str, folder: str) -> None:
    """In the processes of a group: time a copy, a step, or a checkpoint and a step per turn."""
    import chainer
    import numpy as np
    from mpi4py import MPI

    import chainermn
    from chainermn.extensions._checkpointing import late_copies, state
    from chainermn.extensions._checkpointing.background import wait_for_all

    world = MPI.COMM_WORLD
    comm = chainermn.create_communicator('naive')
    resnet = chainer.links.ResNet50Layers(pretrained_model=None)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.Adam(1e-9), comm).setup(resnet)
    x = np.random.RandomState(world.rank).rand(1, 3, 64, 64).astype(np.float32)
    files = tempfile.mkdtemp(dir=os.environ['CHECKPOINT_FILES'])
    checkpointer = chainermn.create_multi_node_checkpointer(
        'run', comm, cp_interval=1, gc_interval=1, path=files)
    iteration, waited = 0, 0.
    find_late, finish_copies = state.late_copies, late_copies.finish_copies

    def timed() -> None:
        nonlocal waited
        start = time.perf_counter()
        finish_copies()
        waited += time.perf_counter() - start

    late_copies.finish_copies = timed

    def step() -> None:
        optimizer.update(lambda: chainer.functions.sum(resnet(x, layers=['fc6'])['fc6']))

    def seconds(do: Callable[[], object]) -> float:
        world.Barrier()
        start = time.perf_counter()
        do()
        return world.allreduce(time.perf_counter() - start, MPI.MAX)

    def turn(what: str) -> list[float]:
        nonlocal iteration, waited
        state.late_copies = find_late
        if what == 'copy':
            arrays = [array for param in resnet.params()
                      for array in (param.array, *param.update_rule.state.values())]
            return [statistics.median(seconds(lambda: [x.copy() for x in arrays])
                                      for _ in range(3))]
        if what == 'step':
            step()  # fills the caches
            return [seconds(step)]
        if what == 'immediate':
            state.late_copies = lambda target: late_copies.LateCopies()
        iteration, waited = iteration + 1, 0.
        call = seconds(lambda: checkpointer.save(
            {'model': resnet, 'optimizer': optimizer}, iteration, wait=False))
        total = call + seconds(step)
        stall = call + world.allreduce(waited, MPI.MAX)
        wait_for_all()
        return [stall, total]

    for _ in range(3):
        step()
    _rounds.answer(kind, folder, world.rank, turn)
    checkpointer.finalize()
    world.Barrier()
    os.rmdir(files)


def work(kind: str, folder: str) -> None:
    """In the processes of a group: time a copy, steps, or a checkpoint and steps per turn."""
    import chainer
    import numpy as np
    from mpi4py import MPI

    import chainermn

    assert (kind == V7) != chainermn.__version__.startswith('8.'), chainermn.__file__
    world = MPI.COMM_WORLD
    model = chainer.Sequential(*(chainer.links.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = chainer.optimizers.SGD(1e-12).setup(model)
    x = np.random.RandomState(world.rank).rand(16, WIDTH).astype(np.float32)
    files = tempfile.mkdtemp(dir=os.environ['CHECKPOINT_FILES'])
    checkpointer = chainermn.create_multi_node_checkpointer(
        'run', chainermn.create_communicator('naive'), cp_interval=1, path=files)
    how = {} if kind == V7 else {'wait': False}
    iteration = 0

    def slowest(start: float) -> float:
        return world.allreduce(time.perf_counter() - start, MPI.MAX)

    def turn(what: str) -> list[float]:
        nonlocal iteration
        world.Barrier()
        start = time.perf_counter()
        if what == 'copy':
            seconds = []
            for _ in range(3):  # the first one may wait for memory
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
        if kind == V8:
            from chainermn.extensions._checkpointing.background import wait_for_all

            wait_for_all()  # so that the background thread does not disturb the next turn
        written = slowest(start)
        return [world.allreduce(call, MPI.MAX), total, written]

    _rounds.answer(kind, folder, world.rank, turn)
    checkpointer.finalize()
    world.Barrier()
    os.rmdir(files)


def measure_stall(ranks: int, rounds: int) -> list:
    """Measure the stall, print it, and return a row."""
    stalls: dict[str, list[float]] = {'late': [], 'immediate': []}
    steps: dict[str, list[float]] = {'late': [], 'immediate': []}
    alone, copies = [], []
    with _rounds.groups(__file__, ranks, [STALL]) as groups:
        ask = groups[STALL].ask
        for n in range(-1, rounds):
            step, = ask('step')
            copy, = ask('copy')
            for what in ('late', 'immediate') if n % 2 else ('immediate', 'late'):
                stall, total = ask(what)
                if n >= 0:
                    stalls[what].append(stall)
                    steps[what].append(total - step)
            if n >= 0:
                alone.append(step)
                copies.append(copy)
    print(f'ResNet-50 with Adam on each of {ranks} ranks, {rounds} rounds: a copy takes '
          f'{statistics.median(copies) * 1e3:.1f} ms, a step '
          f'{statistics.median(alone) * 1e3:.0f} ms')
    for name, values, goal in [('stall', stalls, f'; goal {STALL_GOAL:g}'), ('step', steps, '')]:
        print(f'{name}: {statistics.median(values["late"]) * 1e3:.3f} ms, '
              f'{_rounds.times(values["late"], copies)} a copy; copied in the call '
              f'{_rounds.times(values["immediate"], copies)}{goal}')
    return ['stall of ResNet-50 with Adam', statistics.median(stalls['late']) * 1e3, None,
            statistics.median(copies) * 1e3]


def measure_call(ranks: int, rounds: int) -> tuple[list[list], dict[str, dict[str, list[float]]]]:
    """Measure calls and the steps after them; return rows, and milliseconds by kind."""
    call: dict[str, list[float]] = {V8: [], V7: [], 'copy': []}
    added: dict[str, list[float]] = {V8: [], V7: []}
    written, steps = [], []
    with _rounds.groups(__file__, ranks) as groups:
        for n in range(-1, rounds):
            for kind in (V8, V7) if n % 2 else (V7, V8):
                _, alone, _ = groups[kind].ask('steps')
                copy, = groups[kind].ask('copy')
                blocked, total, end = groups[kind].ask('save')
                if n < 0:
                    continue  # warms up
                call[kind].append(blocked)
                added[kind].append(total - alone)
                if kind == V8:
                    call['copy'].append(copy)
                    written.append(end)
                    steps.append(alone)
    print(f'{size():.0f} MB on each of {ranks} ranks, {rounds} rounds')
    print(_rounds.show('call', call[V8], call[V7], GOAL))
    print(_rounds.show(f'added to {STEPS} steps', added[V8], added[V7], GOAL))
    each = _rounds.ratios(call[V8], call['copy'])
    print(f'call against a copy: {statistics.median(call["copy"]) * 1e3:.3f} ms, '
          f'{statistics.median(each):.3f} ({min(each):.3f} to {max(each):.3f}) times; '
          f'goal {COPY:g}')
    print(f'{STEPS} steps without: {statistics.median(steps) * 1e3:.0f} ms; on the disk after '
          f'{statistics.median(written) * 1e3:.0f} ms;', _rounds.load())
    rows, drawn = [], {V8: {}, V7: {}}
    for name, seconds in [(f'call that saves {size():.0f} MB', call),
                          (f'added to the next {STEPS} steps', added)]:
        rows.append([name, *(statistics.median(each) * 1e3 for each in seconds.values())])
        for kind, shown in drawn.items():
            shown[name] = [1e3 * one for one in seconds[kind]]
    rows[1].append(None)
    return rows, drawn


def size() -> float:
    """Return the size of the model of the first part, in MB."""
    width = int(os.environ.get('CHECKPOINT_WIDTH', WIDTH))
    return LAYERS * (width + 1) * width * 4 / 1e6


def main() -> None:
    """Run the benchmark and print the results."""
    parser = _rounds.parser(__doc__, rounds=5, ranks=2)
    parser.add_argument('--part', choices=['call', 'stall'], help='default: both')
    parser.add_argument('--folder-of-files', metavar='DIR', help='folder on the disk to measure')
    args = parser.parse_args()
    if args.work:
        (work_on_stall if 'stall' in args.work else work)(args.work, args.folder)
        return
    if args.quick:
        args.rounds = 1
        os.environ['CHECKPOINT_WIDTH'] = '100'
    with tempfile.TemporaryDirectory(dir=args.folder_of_files) as files:
        os.environ['CHECKPOINT_FILES'] = files
        rows: list[list] = []
        drawn: dict[str, dict[str, list[float]]] = {}
        if args.part != 'call':
            rows.append(measure_stall(args.ranks, args.rounds))
        if args.part != 'stall':
            of_call, drawn = measure_call(args.ranks, args.rounds)
            rows += of_call
        _rounds.table(['time', f'{V8}, ms', f'{V7}, ms', 'copy in memory, ms'], rows,
                      f'{args.ranks} ranks')
        if args.svg and drawn:
            _rounds.chart(args.svg, 'Delay by a checkpoint', 'time, ms', drawn,
                          is_log=True)


if __name__ == '__main__':
    main()
