"""This process and its system: runtime, environment, MPI, files and connections."""
