"""This process and the operating system: runtime, environment, MPI, files and connections."""
