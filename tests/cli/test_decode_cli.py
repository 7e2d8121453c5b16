"""``sdbench decode`` as a user calls it, on a tiny model."""

import pytest
import torch

SHORT = ("--tokens", 5, "--repeats", 1, "--warmup-tokens", 0, "--context", 4, "--no-baselines", "--device", "cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--context", 0), "--context is 0; it must be at least 1"),
        (("--tokens", 1), "--tokens is 1; it must be at least 2"),
        (("--pattern", "5:4"), "N:M keeps N of M"),
        (("--profile",), "--device cpu: --profile counts a GPU's kernels; leave it out"),
    ],
)
def test_usage(arguments, message, sdbench, tmp_path):
    sdbench("decode", "--model", "demo", *SHORT, *arguments, "--output", "run").refuses(2, message)
    assert not list(tmp_path.iterdir())


def test_a_profile_without_a_gpu(sdbench, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sdbench("decode", "--model", "demo", "--profile", "--output", "run").refuses(1, "no CUDA device: --profile counts a GPU's kernels")
    assert not list(tmp_path.iterdir())
