"""The parts that checkpoints and snapshots share. docs/developers.md explains the design.

From the bottom up: ``parts`` finds the optimizers, models and iterators of an object, ``classes``
names their classes, ``progress`` tells how far iterators are, ``state`` copies the state, and large
arrays with ``late_copies``. ``npz`` stores arrays, ``rank_file`` writes and verifies the file of
one rank, ``save_names`` has the names of the files, ``background`` writes in a thread, ``lock`` and
``job_lock`` keep other jobs away, ``saver`` combines these, and ``removal`` removes the files of a
complete training. ``selection`` finds the checkpoint to resume from, ``resume`` loads it,
``merged_states`` merges the states that each rank has saved a part of, and ``late_extensions``
loads extensions that are added later. ``snapshot_arguments`` checks the arguments of
``multi_node_snapshot``, and ``command`` verifies a folder.
"""
