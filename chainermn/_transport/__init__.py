"""How bytes move between ranks: MPI, shared memory, NCCL."""
