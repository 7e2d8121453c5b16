"""Which linears are pruned: all but the output embedding, narrowed by shell-style patterns on their names."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from sdbench.calibrate.registry import did_you_mean
from sdbench.errors import ExitCode, SdbenchError, UsageError


def select_linears(model: Any, targets: Sequence[str] = (), ignore: Sequence[str] = ()) -> dict[str, nn.Linear]:
    """The linears to prune, by dotted name, in the model's order.

    A pattern is a shell-style glob (``*`` also matches dots), matched against the full name (``model.layers.0.*``) or its last component
    (``down_proj``). The output embedding (lm_head) and any linear that shares the input embedding's weight always stay dense.

    Args:
        model: A transformers causal language model.
        targets: Patterns of the layers to take; none takes all.
        ignore: Patterns of the layers to leave out afterwards.

    Raises:
        UsageError: A pattern matches no linear, or a target matches nothing but the output embedding.
        SdbenchError: Nothing is left (exit code 5).
    """
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    kept_dense = _embeddings(model, linears)
    for kind, patterns in (("target", targets), ("ignore", ignore)):
        for pattern in patterns:
            matched = {name for name in linears if _matches(name, pattern)}
            if not matched:
                raise UsageError(f"{kind} pattern {pattern!r} matches no linear layer; {did_you_mean(pattern, _spellings(linears))}")
            if kind == "target" and matched <= kept_dense:
                raise UsageError(
                    f"target pattern {pattern!r} matches only {', '.join(sorted(matched))}, an embedding matrix, which always stays dense"
                )
    chosen = {
        name: linear
        for name, linear in linears.items()
        if name not in kept_dense
        and (not targets or any(_matches(name, pattern) for pattern in targets))
        and not any(_matches(name, pattern) for pattern in ignore)
    }
    if not chosen:
        reason = "--ignore leaves none of them" if ignore else "the model has none besides its embeddings"
        raise SdbenchError(f"no linear layer to prune: {reason}", ExitCode.NOTHING_SELECTED)
    return chosen


def _embeddings(model: Any, linears: dict[str, nn.Linear]) -> set[str]:
    """Names of the linears that are the output embedding or tied to the input embedding."""
    head = model.get_output_embeddings()
    table = getattr(model.get_input_embeddings(), "weight", None)
    return {name for name, linear in linears.items() if linear is head or linear.weight is table}


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)


def _spellings(linears: Iterable[str]) -> list[str]:
    """What a pattern may be meant to say: last components, each once; full names would be hundreds."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name in linears))
