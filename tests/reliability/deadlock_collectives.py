"""Deadlocks of collective operations, with messages and with other communicators."""

from deadlock_case import ARRAY, LARGE, deadlock, model
from mpi4py.MPI import ANY_SOURCE

import chainermn


@deadlock(2, bystanders=2)
def bcast_and_send(comm):
    if comm.rank == 0:
        comm.bcast(ARRAY)  # 0 waits for 1
        comm.recv(1, 0)
    else:
        comm.send(ARRAY, 0, 0)  # 1 waits for 0
        comm.bcast(None)


@deadlock(2, bystanders=2)
def barrier_and_recv(comm):
    if comm.rank == 0:
        comm.barrier()  # 0 waits for 1
    else:
        comm.recv(0, 0)  # 1 waits for 0


@deadlock(3)
def recv_without_a_sender(comm):
    """The others are in a collective operation."""
    if comm.rank == 2:
        comm.recv(0, 0)  # 2 waits for 0
    comm.allreduce(ARRAY)  # 0 waits for 2, (1 waits for 2)


@deadlock(3)
def any_source_without_a_sender(comm):
    if comm.rank == 0:
        comm.recv(ANY_SOURCE, 0)  # 0 waits for 1 or 2
    comm.barrier()  # (1 waits for 0), (2 waits for 0)


@deadlock(2)
def large_object_and_barrier(comm):
    if comm.rank == 0:
        comm.send_obj(LARGE, 1)  # 0 waits for 1
    comm.barrier()  # 1 waits for 0


@deadlock(2)
def bcast_obj_and_wait(comm):
    if comm.rank == 0:
        comm.bcast_obj('text')  # 0 waits for 1
        comm.send(ARRAY, 1, 0)
    else:
        comm.irecv(0).wait()  # 1 waits for 0
        comm.bcast_obj(None)


@deadlock(2)
def two_communicators_in_different_order(comm, second):
    if comm.rank == 0:
        comm.allreduce(ARRAY)  # 0 waits for 1
        second.allreduce(ARRAY)
    else:
        second.allreduce(ARRAY)  # 1 waits for 0
        comm.allreduce(ARRAY)


@deadlock(2)
def two_communicators_after_many_operations(comm, second):
    for _ in range(50):
        comm.allreduce(ARRAY)
        second.bcast(ARRAY)
    if comm.rank == 0:
        comm.gather(ARRAY)  # 0 waits for 1
    else:
        second.allgather(ARRAY)  # 1 waits for 0


@deadlock(3)
def three_communicators_in_a_circle(comm):
    """Each rank begins with the communicator that it shares with its right neighbor."""
    pairs = {(a, b): comm.new_group([a, b]) for a, b in ((0, 1), (1, 2), (0, 2))}
    if comm.rank == 0:
        pairs[0, 1].barrier()  # 0 waits for 1
    elif comm.rank == 1:
        pairs[1, 2].barrier()  # 1 waits for 2
    else:
        pairs[0, 2].barrier()  # 2 waits for 0


@deadlock(4)
def rows_and_columns(comm):
    """Communicators of a grid of 2 x 2 ranks."""
    row, column = comm.split(comm.rank // 2, comm.rank), comm.split(comm.rank % 2, comm.rank)
    if comm.rank in (0, 3):
        row.allreduce(ARRAY)  # 0 waits for 1, 3 waits for 2
    else:
        column.allreduce(ARRAY)  # 1 waits for 3, 2 waits for 0


@deadlock(3)
def subgroup_and_all_ranks(comm):
    """Two ranks use their communicator, but the second one is in an operation of all ranks."""
    part = comm.split(comm.rank < 2, comm.rank)
    if comm.rank == 0:
        part.bcast_obj('text')  # 0 waits for 1
    comm.barrier()  # 1 waits for 0, (2 waits for 0)


@deadlock(2)
def split_by_one_rank(comm, second):
    if comm.rank == 0:
        comm.split(0, 0)  # 0 waits for 1
    second.barrier()  # 1 waits for 0


@deadlock(3)
def new_group_by_its_members_only(comm, second):
    """All ranks have to call it."""
    if comm.rank < 2:
        comm.new_group([0, 1])  # (0 waits for 2), (1 waits for 2)
    second.barrier()  # 2 waits for 0 and 1


@deadlock(3)
def two_communicators_of_three_ranks(comm, second):
    if comm.rank == 0:
        comm.barrier()  # (0 waits for 1 and 2)
    second.barrier()  # (1 waits for 0), (2 waits for 0)


@deadlock(2)
def create_communicator_by_one_rank(comm):
    if comm.rank == 0:
        chainermn.create_communicator('naive')  # 0 waits for 1
    comm.barrier()  # 1 waits for 0


@deadlock(3)
def create_communicator_by_two_ranks(comm):
    if comm.rank != 1:
        chainermn.create_communicator('flat')  # 0 waits for 1, (2 waits for 1)
    comm.recv(0, 0)  # 1 waits for 0


@deadlock(2)
def finalize_by_one_rank(comm):
    if comm.rank == 0:
        comm.finalize()  # 0 waits for 1
    else:
        comm.recv(0, 0)  # 1 waits for 0


@deadlock(3)
def with_a_finished_rank(comm):
    """Rank 2 has ended its program, and needs nothing more."""
    if comm.rank == 0:
        comm.recv(1, 0)  # 0 waits for 1
    elif comm.rank == 1:
        comm.recv(0, 0)  # 1 waits for 0


@deadlock(2)
def bcast_data_on_another_communicator(comm, second):
    if comm.rank == 0:
        second.bcast_data(model())  # 0 waits for 1
    else:
        comm.multi_node_mean_grad(model())  # 1 waits for 0


@deadlock(2)
def mean_of_gradients_on_another_communicator(comm, second):
    if comm.rank == 0:
        second.multi_node_mean_grad(model())  # 0 waits for 1
    else:
        comm.allreduce(ARRAY)  # 1 waits for 0


@deadlock(2)
def scatter_dataset_on_one_rank(comm, second):
    if comm.rank == 0:
        chainermn.scatter_dataset(list(range(100)), comm)  # in gather_obj: 0 waits for 1
    second.barrier()  # 1 waits for 0


@deadlock(3)
def scatter_dataset_on_two_ranks(comm):
    if comm.rank == 2:
        comm.recv(1, 0)  # 2 waits for 1
    data = [*range(9)] if comm.rank == 0 else None
    chainermn.scatter_dataset(data, comm)  # in gather_obj: (0 waits for 2), 1 waits for 2
