"""What the package needs from the operating system: files, processes and connections."""
