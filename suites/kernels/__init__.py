"""The kernel suite: every variant on a model's shapes, checked, searched and timed beside the dense baselines."""
