"""y = W x for a dense weight at batch 1: the baselines that a packed product is measured against."""
