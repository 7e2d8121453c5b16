"""A grid of runs: each in a process of its own, on as many GPUs as there are, resumed from its own directory."""
