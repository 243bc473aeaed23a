"""The parts that checkpoints and snapshots share. docs/developers.md explains the design.

From the bottom up: ``parts`` finds the optimizers, models and iterators of an object, ``classes``
compares their classes, ``progress`` records the progress of iterators, and ``state`` copies the
state, with ``late_copies`` for large arrays. ``npz`` stores arrays, ``rank_file`` writes and
verifies the file of one rank, ``save_names`` determines the names of the files, ``background``
writes in a thread, ``lock`` and ``job_lock`` lock the files against other jobs, ``saver`` combines
these modules, and ``removal`` removes the files when a training run is complete. ``selection``
finds the checkpoint to resume from, ``resume`` loads it, ``merged_states`` merges states of which
each rank has saved a part, and ``late_extensions`` loads extensions that are added later.
``snapshot_arguments`` checks the arguments of ``multi_node_snapshot``, and ``command`` verifies a
folder.
"""
