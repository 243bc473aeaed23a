"""Runs the GPU tests on the virtual GPU: ``python tests/virtual_gpu/run.py [--fast] [options]``.

The tests run at 1 to 4 ranks in lazy mode, in which work on a device only begins when something
waits for it. They also run at 2 ranks in the other modes (see cuda/settings.h), with one and two
devices. Other options are passed to pytest.
"""

import argparse
import dataclasses
import os
import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import run_ranks  # noqa: E402

TESTS = [str(HERE.parent / 'gpu'), str(HERE)]
#: Tests in which the host accesses device memory, which is impossible with memory protection.
UNPROTECTED = [str(HERE.parent / 'gpu/test_cuda_aware_mpi_on_gpu.py')]


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of the tests."""

    ranks: int
    mode: str = 'lazy'
    devices: int = 1
    seed: int = 0
    protect: bool = True
    tests: tuple[str, ...] = tuple(TESTS)

    def variables(self) -> dict[str, str]:
        return {'VGPU_MODE': self.mode, 'VGPU_DEVICES': str(self.devices),
                'VGPU_SEED': str(self.seed), 'VGPU_PROTECT': str(int(self.protect)),
                'VGPU_POISON': '1'}


TWO_RANKS = [Run(2), Run(2, protect=False, tests=tuple(UNPROTECTED))]
FAST = [*TWO_RANKS, Run(1, tests=(str(HERE.parent / 'gpu/test_updates_on_gpu.py'),))]
ALL = [
    *TWO_RANKS, Run(1), Run(3), Run(4), Run(1, devices=2), Run(2, devices=2),
    Run(2, 'eager', protect=False), Run(2, 'eager', devices=2, protect=False),
    *(Run(2, 'random', devices=1 + seed % 2, seed=seed, protect=False) for seed in range(5)),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument('--fast', action='store_true', help='only lazy mode: 2 ranks, and updates')
    parser.add_argument('tests', nargs='*', help='default: all GPU tests')
    args, options = parser.parse_known_args()
    failed = []
    for run in FAST if args.fast else ALL:
        os.environ.update(run.variables())
        print(f'\n{run.mode}, devices: {run.devices}, seed: {run.seed}, protected: {run.protect}')
        options_of_run = ['-m', 'gpu', '-q', *options, *(args.tests or run.tests)]
        status, _ = run_ranks.run(run.ranks, options_of_run)
        if status != 0:
            failed.append(run)
    for run in failed:
        print(f'failed: {" ".join(f"{k}={v}" for k, v in run.variables().items())} '
              f'python tests/run_ranks.py --ranks {run.ranks} -m gpu {" ".join(args.tests)}')
    return 1 if failed else 0


if __name__ == '__main__':
    sys.exit(main())
