"""A rank that plays correct programs: ``correct_program.py SEED FIRST NUMBER LONGEST LAST``."""

import os
import pathlib
import random
import sys
import time

sys.path.append(str(pathlib.Path(__file__).parents[1]))

import correct_collectives  # noqa: F401  (adds its parts)
import correct_messages  # noqa: F401
import correct_threads  # noqa: F401
from correct_last import play_last
from correct_play import ARRAY, PARTS, Play

import chainermn


def finish(play: Play, seconds: float) -> None:
    """Some ranks end early; the others still need each other."""
    last = play.comm.split(play.rank % 2, play.rank)
    if play.rank % 2 == play.rng.randrange(2):
        time.sleep(seconds * (last.rank == 0))
        last.allreduce(ARRAY)
        if last.rank == 0 and last.size > 1:
            time.sleep(seconds)
            last.send(ARRAY, 1, 0)
        elif last.rank == 1:
            last.recv(0, 0)


def main() -> None:
    """Plays, and ends."""
    seed, first, number, longest = sys.argv[1], *map(int, sys.argv[2:4]), float(sys.argv[4])
    last = sys.argv[5]
    comm = chainermn.create_communicator(random.Random(seed).choice(['naive', 'flat']))
    play = Play(comm, comm.split(0, comm.rank), comm.split(0, -comm.rank).split(0, comm.rank))
    for n in range(first, first + number):
        names = play.begin(f'{seed} {n} {play.size}', longest)
        for name in names:
            if play.rank == 0:
                os.write(1, f'program {n}: {name}\n'.encode())
            PARTS[name](play)
    if last:
        play.begin(f'{seed} {last} {play.size}', longest)
        play_last(play, last, longest)
        return
    finish(play, play.rng.uniform(.3, 1) * longest)


if __name__ == '__main__':
    main()
