"""y = W x for a 2:4 weight on the GPU's sparse matrix units, which are built for many columns: a baseline at batch 1."""
