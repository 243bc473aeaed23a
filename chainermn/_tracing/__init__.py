"""Record timelines of the operations of each rank."""
