"""What ``sdbench kernels`` times, for ``--benchmark-save`` and ``--benchmark-compare``: every variant on Qwen3-4B's shapes, cold."""

from functools import cache
from typing import Any

import pytest
import torch

from sdbench.architectures import named_shapes
from sdbench.kernels import registry, tuned
from sdbench.kernels.launching import can_run
from sdbench.kernels.registry import Prepare, Variant
from sdbench.pattern import Pattern
from sdbench.suites.kernels.operands import Operand, make_operand
from sdbench.suites.kernels.search import check
from sdbench.suites.kernels.suite import PRUNED, UNPRUNED

SHAPES = named_shapes("qwen3-4b")
PRODUCTS = [
    *((variant, None) for kernel in UNPRUNED for variant in registry.variants(kernel) if variant.serves(1)),
    *((variant, pattern) for pattern in ("2:4", "16:32") for kernel in PRUNED for variant in registry.variants(kernel)),
]


@cache
def operand_of(layer: str, pattern: str | None, prepare: Prepare) -> Operand:
    """An operand that variants share; the layers come one after the other, and one's weights make room for the next one's."""
    return make_operand(SHAPES[layer], torch.bfloat16, Pattern.parse(pattern) if pattern else None, torch.device("cuda", 0), 0, prepare)


@pytest.fixture(params=SHAPES, scope="module")
def layer(request: pytest.FixtureRequest) -> Any:
    yield request.param
    operand_of.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize(("variant", "pattern"), PRODUCTS, ids=[f"{v.kernel}-{v.name}-{pattern or 'unpruned'}" for v, pattern in PRODUCTS])
def test_product(layer: str, variant: Variant, pattern: str | None, time_calls: Any) -> None:
    operand = operand_of(layer, pattern, variant.prepare)
    refusal = can_run(variant.needs, operand.device) or variant.constraint(operand.problem)
    if refusal:
        pytest.skip(f"{variant.name} {refusal}")
    config, source = tuned.lookup(variant, operand.problem, operand.device)
    generator = torch.Generator(operand.device).manual_seed(1)
    trial = check(variant, operand, config, generator)
    assert trial.outcome == "correct", trial.message
    x = torch.randn(operand.problem.in_features, generator=generator, device=operand.device).to(operand.problem.dtype)
    y = torch.empty(operand.problem.out_features, device=operand.device)
    calls = [lambda weight=weight: variant.launch(weight, x, y, config) for weight in operand.copies()]
    info = time_calls(calls, f"{layer} {'x'.join(map(str, SHAPES[layer]))}")
    info |= {"config": dict(config), "config_source": source, "bytes": operand.nbytes, "calls_a_round": len(calls)}
