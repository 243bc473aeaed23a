"""Updates of all parameters of a model in one pass, on the CPU and on GPUs."""
