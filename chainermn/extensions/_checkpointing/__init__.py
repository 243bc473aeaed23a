"""The parts that checkpoints and snapshots share.  docs/developers.md explains the design.

From the bottom up: ``state`` copies the state of an object, ``npz`` stores arrays, ``rank_file``
writes and verifies the file of one rank, ``manifest`` lists the files of a save, ``background``
writes in a thread, ``lock`` keeps other jobs away, ``saver`` combines these, ``selection`` finds
the save to resume from, ``resume`` loads it.  ``command`` verifies a folder.
"""
