"""What an operation is: the table of operations, call signatures, and errors of all ranks."""
