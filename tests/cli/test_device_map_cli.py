"""``--device-map`` of the commands; the engine's part is in tests/engine/test_device_map.py."""

import json
from typing import Any

import pytest
import torch

from sdbench.devices import DEVICE_MAPS
from sdbench.engine.paths import EAGER


@pytest.mark.parametrize("command", [("decode",), ("e2e",), ("prune", "--output", "out")])
def test_a_cpu_is_not_spread_over(command, sdbench):
    sdbench(*command, "--device", "cpu", "--device-map", "auto").refuses(2, "--device-map spreads a model over GPUs; leave it out")


@pytest.mark.parametrize("others", [("--stream",), ("--devices", "cpu,cpu")])
def test_ways_to_share_out_exclude_each_other(others, sdbench):
    done = sdbench("prune", "--output", "out", "--device-map", "auto", *others)
    done.refuses(2, "--stream, --device-map and --devices exclude each other")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
class TestTwoGpus:
    @pytest.fixture
    def call(self, sdbench: Any, checkpoint: Any) -> Any:
        model = checkpoint(num_hidden_layers=6)

        def run(command: str, *arguments: Any) -> dict[str, Any]:
            done = sdbench(command, "--model", model, "--json", *arguments)
            assert done.code == 0, done.err
            return json.loads(done.out)

        return run

    @pytest.mark.parametrize("strategy", [name for name in DEVICE_MAPS if name != "balanced_low_0"])
    def test_decode(self, strategy, call):
        rows = call("decode", "--device-map", strategy, "--context", 8, "--tokens", 4)["rows"]
        assert {row["outcome"] for row in rows if row["path"] == EAGER} == {"correct"}
        # "sequential" fills the first GPU, and a model this small fits.
        assert strategy == "sequential" or {row["devices"] for row in rows} == {2}

    def test_a_small_model_leaves_the_first_gpu_out(self, sdbench, checkpoint):
        done = sdbench("decode", "--model", checkpoint(num_hidden_layers=6), "--device-map", "balanced_low_0")
        done.refuses(1, "--device-map balanced_low_0 finds room for the whole model on cuda:1 alone; use --device cuda:1 in its place")

    def test_e2e(self, call):
        small = ("--calibration-examples", 2, "--validation-examples", 2, "--max-tokens", 8, "--equal-tokens", 8, "--output", "run")
        arms = call("e2e", "--device-map", "balanced", *small)["arms"]
        assert {arm["path"] for arm in arms if arm["arm"] in ("dense", "decode")} == {EAGER}
        assert all(arm["kernel_calls"] == arm["expected_kernel_calls"] for arm in arms)

    @pytest.mark.parametrize("mode", [(), ("--sequential",)], ids=["one pass", "sequential"])
    def test_prune(self, mode, call):
        """Statistics are rounded otherwise where replies come from another loop: what counts is that the replies are the model's own."""
        small = ("--calibration-examples", 3, "--max-tokens", 8, "--method", "sparsegpt", *mode)
        found = call("prune", "--device-map", "balanced", *small, "--output", "out")["provenance"]
        whole = call("prune", *small, "--output", "whole")["provenance"]
        assert found["source"] == whole["source"] and found["calibration"]["rows"] == whole["calibration"]["rows"]
