"""Pruned checkpoints on disk: written, read back as transformers models, and checked."""
