"""The decode suite: every way to decode a model at batch 1, over context lengths, with what a step reads, launches and takes."""
