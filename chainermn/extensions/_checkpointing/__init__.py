"""The parts that checkpoints and snapshots share.  docs/developers.md explains the design.

From the bottom up: ``state`` copies the state of an object, ``npz`` stores arrays, ``classes``
names the classes of saved objects, ``rank_file`` writes and verifies the file of one rank,
``save_names`` names the files, ``background`` writes in a thread, ``lock`` and ``job_lock`` keep
other jobs away, ``saver`` combines these, ``removal`` removes the files of a complete training,
``selection`` finds the save to resume from, ``resume`` loads it, and ``merged_states`` merges the
states that each rank has saved a part of.  ``command`` verifies a folder.
"""
