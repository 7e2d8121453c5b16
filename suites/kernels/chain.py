"""Layers one after another in one CUDA graph, each product reading the one before: what a launch's start and end cost among its neighbours.

A table of single kernels hides them on both sides; a decode step does not. The chain has no norms and no attention: a product's x is the
first part of the y before it. Every layer has weights of its own place, so that none is in a cache.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sdbench.errors import UsageError, one_line
from sdbench.kernels import registry
from sdbench.kernels.registry import Config, Variant
from sdbench.pattern import Pattern
from sdbench.progress import Progress
from sdbench.results import RunDirectory
from sdbench.suites.kernels.measure import Measurement
from sdbench.suites.kernels.operands import Operand, Shape, make_operand
from sdbench.timing import TOLERANCE, graph_times, relative_error, within

Row = dict[str, Any]
BASELINE_CHAINS = ("linear", "dense")


def require_chain(shapes: Mapping[str, Shape]) -> None:
    """Checks that each shape's y is long enough to be the next one's x, and the last one's the first's.

    Raises:
        UsageError: It is not; names both.
    """
    names = list(shapes)
    for name, following in zip(names, [*names[1:], names[0]], strict=True):
        if shapes[name][0] < shapes[following][1]:
            raise UsageError(
                f"--chain: {following} reads {shapes[following][1]} elements and {name} before it gives {shapes[name][0]}; "
                "leave the option out, or order the shapes as a model's layer has them"
            )


@dataclass(frozen=True)
class _Link:
    """One product of a layer.

    Attributes:
        variant: What multiplies.
        config: Its launch parameters.
        weights: One a layer.
        dense: The matrix ``[out, in]`` that each stands for.
        y: ``[out]``, in the dtype of the weight.
    """

    variant: Variant
    config: Config
    weights: list[Any]
    dense: Tensor
    y: Tensor


def run_chains(rows: Sequence[Row], options: Measurement, layers: int, directory: RunDirectory | None, progress: Progress) -> list[Row]:
    """Measures the chains of a run, or finds them in a resumed run directory.

    Args:
        rows: Result rows of the same run, judged.
        options: The run's.
        layers: Layers a chain; 0 for none.
        directory: Where rows go as they finish.
        progress: Where to report.
    """
    if not layers:
        return []
    done = [row for row in (directory.rows if directory else []) if row["record"] == "chain"]
    kept = [{name: value for name, value in row.items() if name not in ("record", "attempt")} for row in done]
    with progress.task("chains", len(_kinds(options))) as task:
        task.advance(len(kept))
        for row in chain_rows(rows, options, layers, kept):
            if directory:
                directory.add_row({"record": "chain", **row})
            kept.append(row)
            task.advance()
    return kept


def _kinds(options: Measurement) -> list[tuple[str, str | None]]:
    sparse: list[tuple[str, str | None]] = [(kernel, str(pattern)) for pattern in options.patterns for kernel in ("spmv", "spmv_partial")]
    return [*((name, None) for name in BASELINE_CHAINS), *sparse]


def chain_rows(rows: Sequence[Row], options: Measurement, layers: int, kept: Sequence[Row]) -> Iterator[Row]:
    """Yields a row a chain: F.linear, the fastest dense kernels, and for each pattern the fastest SpMV, y finished and as partial sums.

    Partial sums are what their consumers would add; nothing reads them here, and x stays the same.

    Args:
        rows: Result rows of the same run, judged; they say which variant and config is the fastest.
        options: The run's.
        layers: Layers of the chain.
        kept: Chains that are measured already, in the same order.
    """
    times = {row["variant"]: row["us"]["p50"] for row in kept if row["us"]}
    for kind, pattern in _kinds(options)[len(kept) :]:
        chosen = {layer: _fastest(rows, kind, pattern, layer) for layer in options.shapes}
        row: Row = {"kernel": "chain", "variant": kind, "pattern": pattern, "layers": layers, "us": None, "us_reason": None}
        row |= {"dependent": kind != "spmv_partial", "products": {}, "outcome": "correct"}
        missing = [layer for layer, found in chosen.items() if found is None]
        if missing:
            yield row | {
                "outcome": "constraint",
                "us_reason": f"no timed config for {', '.join(missing)}",
                "speedup": dict.fromkeys(BASELINE_CHAINS),
            }
            continue
        row["products"] = {layer: {"variant": found["variant"], "config": found["config"]} for layer, found in chosen.items() if found}
        try:
            row |= _measure([found for found in chosen.values() if found], options, layers, dependent=kind != "spmv_partial")
        except torch.OutOfMemoryError as error:
            row |= {"outcome": "out_of_resources", "us_reason": one_line(error)}
        torch.cuda.empty_cache()
        if row["us"]:
            times[kind] = row["us"]["p50"]
        row["speedup"] = {name: times[name] / row["us"]["p50"] if row["us"] and name in times else None for name in BASELINE_CHAINS}
        yield row


def _fastest(rows: Sequence[Row], kind: str, pattern: str | None, layer: str) -> Row | None:
    kernel = "dense" if kind in BASELINE_CHAINS else kind
    timed = [
        row
        for row in rows
        if (row["kernel"], row["pattern"], row["layer"], row["tokens"]) == (kernel, pattern, layer, 1)
        and row["us"]
        and (kind != "linear" or row["variant"] == "linear")
    ]
    return min(timed, key=lambda row: row["us"]["p50"], default=None)


def _measure(chosen: Sequence[Row], options: Measurement, layers: int, dependent: bool) -> Row:
    links = [_link(row, options, layers, seed) for seed, row in enumerate(chosen)]
    generator = torch.Generator(options.device).manual_seed(options.seed)
    start = torch.randn(max(link.dense.shape[1] for link in links), generator=generator, device=options.device).to(options.dtype)
    results: list[Tensor] = []

    def run(upto: int = layers, wait: bool = False) -> None:
        x = y = start
        for layer in range(upto):
            for link in links:
                y = link.variant.launch(link.weights[layer], x[: link.dense.shape[1]], link.y, link.config)
                x = y if dependent else start
                if wait:
                    torch.cuda.synchronize(options.device)
        results.append(y)

    run(1, wait=True)
    error = _error_of_a_layer(results[-1], links, start, dependent)
    run(wait=True)
    one_by_one = results[-1].clone()
    times = graph_times([run])
    # What the graph wrote: a product that read its x before it was all there would differ.
    same = torch.equal(one_by_one, results[-1])
    correct = within(error, TOLERANCE[options.dtype] * len(links)) and same
    nbytes = layers * sum(int(link.weights[0].nbytes) + link.dense.shape[1] * options.dtype.itemsize for link in links)
    return {
        "outcome": "correct" if correct else "incorrect",
        "error": error,
        "us": times.as_dict() if times and correct else None,
        "us_reason": None
        if correct
        else f"relative error {error:.1e} after a layer"
        if same
        else "not the result of one product at a time",
        "bytes": nbytes,
        "gbps": nbytes / times.p50 / 1e3 if times and correct else None,
    }


def _link(row: Row, options: Measurement, layers: int, seed: int) -> _Link:
    variant = registry.find(row["kernel"], row["variant"])
    pattern = Pattern.parse(row["pattern"]) if row["pattern"] else None
    operand = make_operand(options.shapes[row["layer"]], options.dtype, pattern, options.device, seed, variant.prepare)
    # About the length of x in each y, by a power of two, which rounds nothing.
    scale = 2.0 ** -round(math.log2(operand.matrix.shape[1]) / 2)
    operand = Operand(operand.problem, operand.matrix * scale, variant.prepare)
    y = torch.empty(operand.problem.out_features, dtype=options.dtype, device=options.device)
    return _Link(variant, row["config"], [operand.weight, *(operand.weight.clone() for _ in range(layers - 1))], operand.dense, y)


def _error_of_a_layer(got: Tensor, links: Sequence[_Link], x: Tensor, dependent: bool) -> float:
    """Relative Frobenius error of a layer's last y (or sums ``[splits, out]``) against float64."""
    wanted = x.double()
    for link in links:
        wanted = link.dense.double() @ (wanted if dependent else x.double())[: link.dense.shape[1]]
    return relative_error(got.double().sum(0) if got.dim() == 2 else got, wanted)
