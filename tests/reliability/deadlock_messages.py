"""Deadlocks of messages."""

import gc
import threading

from deadlock_case import ARRAY, LARGE, deadlock
from mpi4py.MPI import ANY_SOURCE, ANY_TAG


@deadlock(2, bystanders=2)
def send_and_send(comm):
    if comm.rank == 0:
        comm.send(ARRAY, 1, 0)  # 0 waits for 1
        comm.recv(1, 0)
    else:
        comm.send(ARRAY, 0, 0)  # 1 waits for 0
        comm.recv(0, 0)


@deadlock(2, bystanders=2)
def recv_and_recv(comm):
    if comm.rank == 0:
        comm.recv(1, 0)  # 0 waits for 1
        comm.send(ARRAY, 1, 0)
    else:
        comm.recv(0, 0)  # 1 waits for 0
        comm.send(ARRAY, 0, 0)


@deadlock(2)
def send_and_send_of_large_arrays(comm):
    if comm.rank == 0:
        comm.send(LARGE, 1, 0)  # 0 waits for 1
    else:
        comm.send((LARGE, ARRAY), 0, 0)  # 1 waits for 0


@deadlock(2, bystanders=2)
def wrong_tag(comm):
    if comm.rank == 0:
        comm.send(ARRAY, 1, 5)  # 0 waits for 1
    else:
        comm.recv(0, 6)  # 1 waits for 0


@deadlock(2)
def two_tags_in_different_order(comm):
    if comm.rank == 0:
        comm.send(ARRAY, 1, 1)  # 0 waits for 1
        comm.send(ARRAY, 1, 2)
    else:
        comm.recv(0, 2)  # 1 waits for 0
        comm.recv(0, 1)


@deadlock(2)
def later_message_with_wrong_tag(comm):
    """After many messages in both directions."""
    other = 1 - comm.rank
    for n in range(100):
        if comm.rank == 0:
            comm.send(ARRAY, other, n % 3)
            comm.recv(other, n % 2)
        else:
            comm.recv(other, n % 3)
            comm.send(ARRAY, other, n % 2)
    if comm.rank == 0:
        comm.send(ARRAY, other, 3)  # 0 waits for 1
    else:
        comm.recv(other, 2)  # 1 waits for 0


@deadlock(3, bystanders=1)
def wrong_peer(comm):
    """Rank 1 expects the message from rank 2, which rank 0 sends."""
    if comm.rank == 0:
        comm.send(ARRAY, 1, 0)  # 0 waits for 1
        comm.send(ARRAY, 2, 0)
    elif comm.rank == 1:
        comm.recv(2, 0)  # 1 waits for 2
    else:
        comm.recv(0, 0)  # 2 waits for 0
        comm.send(ARRAY, 1, 0)


@deadlock(2)
def any_tag(comm):
    comm.recv(1 - comm.rank, ANY_TAG)  # 0 waits for 1, 1 waits for 0


@deadlock(3, bystanders=1)
def ring_of_3_sends(comm):
    right, left = (comm.rank + 1) % 3, (comm.rank - 1) % 3
    comm.send(ARRAY, right, 0)  # 0 waits for 1, 1 waits for 2, 2 waits for 0
    comm.recv(left, 0)


@deadlock(4)
def ring_of_4_receives(comm):
    right, left = (comm.rank + 1) % 4, (comm.rank - 1) % 4
    comm.recv(left, 0)  # 0 waits for 3, 1 waits for 0, 2 waits for 1, 3 waits for 2
    comm.send(ARRAY, right, 0)


@deadlock(4)
def cycle_of_4_with_messages_and_objects(comm):
    if comm.rank == 0:
        comm.send(ARRAY, 2, 0)  # 0 waits for 2
    elif comm.rank == 1:
        comm.recv_obj(0)  # 1 waits for 0
    elif comm.rank == 2:
        comm.send_obj(LARGE, 3)  # 2 waits for 3
    else:
        comm.recv(1, 7)  # 3 waits for 1


@deadlock(4)
def chain_into_a_cycle(comm):
    """Ranks 2 and 3 are blocked as well."""
    if comm.rank == 0:
        comm.recv(1, 0)  # 0 waits for 1
    elif comm.rank == 1:
        comm.recv(0, 0)  # 1 waits for 0
    elif comm.rank == 2:
        comm.recv(1, 0)  # (2 waits for 1)
    else:
        comm.send(ARRAY, 2, 0)  # (3 waits for 2)


@deadlock(4)
def two_cycles(comm):
    """Either one may be reported."""
    other = comm.rank ^ 1
    # (The marks are in parentheses, since only one pair is reported.)
    comm.recv(other, 0)  # (0 waits for 1), (1 waits for 0), (2 waits for 3), (3 waits for 2)


@deadlock(2, bystanders=2)
def recv_obj_and_recv_obj(comm):
    if comm.rank == 0:
        comm.recv_obj(1)  # 0 waits for 1
        comm.send_obj('text', 1)
    else:
        comm.recv_obj(0)  # 1 waits for 0
        comm.send_obj('text', 0)


@deadlock(2, bystanders=2)
def large_send_obj_and_send_obj(comm):
    other = 1 - comm.rank
    comm.send_obj(LARGE, other)  # 0 waits for 1, 1 waits for 0
    comm.recv_obj(other)


@deadlock(2)
def object_with_wrong_tag(comm):
    """The small object has been sent, so that rank 0 waits for the answer."""
    if comm.rank == 0:
        comm.send_obj('question', 1, tag=3)
        comm.recv_obj(1, tag=3)  # 0 waits for 1
    else:
        comm.recv_obj(0, tag=4)  # 1 waits for 0
        comm.send_obj('answer', 0, tag=3)


@deadlock(3)
def any_source_on_all_ranks(comm):
    comm.recv(ANY_SOURCE, 0)  # (0 waits for 1 or 2), (1 waits for 0 or 2), (2 waits for 0 or 1)


@deadlock(3)
def any_source_while_the_others_wait_for_this_rank(comm):
    if comm.rank == 0:
        comm.recv_obj(ANY_SOURCE, tag=0)  # 0 waits for 1 or 2
    elif comm.rank == 1:
        comm.send(ARRAY, 0, 1)  # (1 waits for 0)
    else:
        comm.recv(0, 0)  # (2 waits for 0)


@deadlock(2, bystanders=2)
def wait_of_irecv(comm):
    other = 1 - comm.rank
    request = comm.irecv(other)
    request.wait()  # 0 waits for 1, 1 waits for 0
    comm.isend(ARRAY, other).wait()


@deadlock(2, bystanders=2)
def waitall_of_several(comm):
    other = 1 - comm.rank
    requests = [comm.irecv(other, tag) for tag in range(3)]
    requests += [comm.isend(ARRAY, other, tag) for tag in range(2)]
    comm.waitall(requests)  # 0 waits for 1, 1 waits for 0


@deadlock(3)
def missing_isend(comm):
    """Rank 2 forgets to send to rank 0."""
    right, left = (comm.rank + 1) % 3, (comm.rank - 1) % 3
    request = comm.irecv(left)
    if comm.rank != 2:
        comm.isend(ARRAY, right)
    request.wait()  # 0 waits for 2
    comm.barrier()  # (1 waits for 0), 2 waits for 0


@deadlock(2)
def send_while_a_request_is_pending(comm):
    other = 1 - comm.rank
    request = comm.irecv(other, 9)
    comm.send(ARRAY, other, 8)  # 0 waits for 1, 1 waits for 0
    request.wait()


@deadlock(2)
def recv_while_a_request_is_pending(comm):
    other = 1 - comm.rank
    request = comm.irecv(other, 9)
    comm.recv(other, 8)  # 0 waits for 1, 1 waits for 0
    request.wait()


@deadlock(2)
def in_a_function(comm):
    other = 1 - comm.rank

    def exchange():
        comm.send(ARRAY, other, 0)  # 0 waits for 1, 1 waits for 0

    exchange()


@deadlock(3)
def two_threads_of_a_rank(comm):
    """Each of them waits for another rank, on one communicator: two deadlocks."""
    def receive():
        comm.recv(2, 6)  # (0 waits for 2)

    if comm.rank == 0:
        thread = threading.Thread(target=receive)
        thread.start()
        comm.recv(1, 5)  # (0 waits for 1)
        comm.send(ARRAY, 2, 7)
        thread.join()
    elif comm.rank == 1:
        comm.recv(0, 5)  # (1 waits for 0)
    else:
        comm.recv(0, 7)  # (2 waits for 0)


@deadlock(2)
def on_a_split_communicator(comm, second):
    """The report must give the ranks in the job, not the ranks in the communicator."""
    reverse = second.split(0, -second.rank)
    if reverse.rank == 0:
        reverse.recv(1, 0)  # 1 waits for 0
    else:
        reverse.recv(0, 0)  # 0 waits for 1


@deadlock(2)
def of_a_communicator_without_references(comm):
    """Rank 1 has dropped the communicator of the message, which is not freed, as rank 0 uses it."""
    own = comm.split(0, comm.rank)
    if comm.rank == 0:
        own.recv(1, 0)  # 0 waits for 1
    else:
        del own
        gc.collect()
        comm.recv(0, 0)  # 1 waits for 0
