"""Datasets for several ranks: each rank gets its own shard, from another rank or from files."""
import chainermn.datasets.scatter_dataset  # noqa: F401  (before the function of this name)
from chainermn.datasets.empty_dataset import create_empty_dataset
from chainermn.datasets.scatter import DataSizeError, scatter_dataset, scatter_index
from chainermn.datasets.write_shards import write_shards

__all__ = ['DataSizeError', 'create_empty_dataset', 'scatter_dataset', 'scatter_index',
           'write_shards']
