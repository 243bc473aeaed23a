"""Starts ``torch.distributed`` with gloo in processes that mpiexec has started."""

import os
from collections.abc import Callable


def start(folder: str, name: str = 'PyTorch'
          ) -> tuple[int, Callable[[], None], Callable[[float], float]]:
    """Join the process group; return the rank, a barrier, and a maximum over the ranks.

    Args:
        folder: Folder of the file through which the processes find each other.
        name: Name of the file.
    """
    import torch
    import torch.distributed as dist

    rank = int(os.environ.get('PMI_RANK', os.environ.get('OMPI_COMM_WORLD_RANK', 0)))
    size = int(os.environ.get('PMI_SIZE', os.environ.get('OMPI_COMM_WORLD_SIZE', 1)))
    # With this variable, versions of gloo that support shared memory use it.
    os.environ.setdefault('LOCAL_WORLD_SIZE', os.environ.get(
        'MPI_LOCALNRANKS', os.environ.get('OMPI_COMM_WORLD_LOCAL_SIZE', str(size))))
    torch.set_num_threads(1)
    dist.init_process_group('gloo', init_method=f'file://{folder}/{name}', rank=rank,
                            world_size=size)

    def maximum(x: float) -> float:
        tensor = torch.tensor(x, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return float(tensor)

    return rank, dist.barrier, maximum
