"""Data transfer between ranks: MPI, shared memory, NCCL."""
