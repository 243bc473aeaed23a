"""A rank of a deadlock: ``deadlock_program.py CASE COMMUNICATOR FOLDER``."""

import inspect
import sys
import time

import deadlock_collectives  # noqa: F401  (adds its cases)
import deadlock_messages  # noqa: F401
import deadlock_models  # noqa: F401
from deadlock_case import CASES, stand_by

import chainermn


def main():
    """Plays the part of this rank, after the time is written down."""
    _, name, communicator, folder = sys.argv
    case = CASES[name]
    comm = chainermn.create_communicator(communicator)
    needs_second = len(inspect.signature(case.play).parameters) > 1
    communicators = [comm, comm.split(0, comm.rank)] if needs_second else [comm]
    with open(f'{folder}/when-{comm.rank}', 'w') as file:
        file.write(str(time.time()))
    if comm.rank >= case.n:
        stand_by(comm, case.n)
    case.play(*communicators)


if __name__ == '__main__':
    main()
