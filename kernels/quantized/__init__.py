"""y = W x for weight-only 8-bit weights at batch 1, one float32 scale an output channel: what a user would pick instead of pruning."""
