"""The small kernels between the products of a decode step at batch 1, each beside its torch reference."""
