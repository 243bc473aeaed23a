"""Receives an object from any source after it has arrived."""

import time

from mpi4py import MPI

import chainermn

comm = chainermn.create_communicator('flat')
if comm.rank > 0:
    comm.send_obj('object', 0)
else:
    time.sleep(1)
    comm.mpi_comm.Iprobe()  # MPI now takes what has arrived from the network
    print('received', comm.recv_obj(MPI.ANY_SOURCE))
