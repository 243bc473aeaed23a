"""What an operation is: the table of operations, calls, call signatures, errors of all ranks."""
