"""The commands of the command line interface, one module or package each."""
