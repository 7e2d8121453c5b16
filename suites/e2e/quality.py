"""What an arm's row says of its answers: right ones, ends, scores, and how the replies behave."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from sdbench.suites.behaviour import find_loop, length_ratio, net_speedup, repeated_share, seconds_per_correct
from sdbench.suites.statistics import mcnemar

Sample = Mapping[str, Any]

NOTHING_RIGHT = "no right answer"
NO_REPLIES, BASELINE = "no replies", "this arm is the baseline"


def quality(samples: Sequence[Sample], control: Sequence[bool] | None, dense: Sequence[Sample]) -> dict[str, Any]:
    """Fields of an arm's row that come from its answers alone.

    Args:
        samples: The arm's, in the order of the questions; none where nothing was asked.
        control: Right or wrong of the control's, where this arm is to be compared with it.
        dense: The dense arm's samples of the same questions; none for the dense arm itself.
    """
    graded = [sample for sample in samples if sample["match"] is not None]
    why_not = Counter(sample["match_reason"] for sample in samples if sample.get("match_reason"))
    tokens = [sample["tokens"] for sample in samples]
    inflation = length_ratio(tokens, [sample["tokens"] for sample in dense]) if samples and dense else None
    return {
        "examples": len(samples),
        "graded": len(graded),
        "answer_match": sum(sample["match"] for sample in graded) if graded else None,
        "answer_match_reason": "; ".join(f"{reason} ({count})" for reason, count in why_not.items()) or None,
        # Where a run's samples are not at hand, several runs can still be compared question by question.
        "matches": {sample["example"]: sample["match"] for sample in samples} or None,
        "answer_match_p": mcnemar(matches(samples), control) if control and samples else None,
        "eos": sum(sample["eos"] for sample in samples) if samples else None,
        "truncated": sum(sample["truncated"] for sample in samples) if samples else None,
        "reply_tokens": median(tokens) if samples else None,
        "length_ratio": inflation,
        "length_ratio_reason": None if inflation is not None else BASELINE if samples else NO_REPLIES,
        "loops": sum(find_loop(sample["ids"]) is not None for sample in samples) if samples else None,
        "repeated_4grams": _mean([repeated_share(sample["ids"]) for sample in samples]),
        **_execution(samples),
        **_score(samples),
    }


def worth(row: Mapping[str, Any], samples: Sequence[Sample]) -> dict[str, Any]:
    """Fields that take answers and rates together.

    Args:
        row: The arm's, with ``speedup``, ``length_ratio``, ``decode_rate`` and ``answer_match``.
        samples: The arm's.
    """
    net = net_speedup(row["speedup"], row["length_ratio"])
    cost = seconds_per_correct([sample["tokens"] for sample in samples], row["decode_rate"], row["answer_match"])
    return {
        "net_speedup": net,
        "net_speedup_reason": None if net is not None else row["speedup_reason"] or row["length_ratio_reason"],
        "seconds_per_correct": cost,
        "seconds_per_correct_reason": None if cost is not None else _no_cost(row),
    }


def matches(samples: Sequence[Sample]) -> list[bool]:
    """Right or not, a reply each; what was not judged is not right, in every arm alike."""
    return [bool(sample["match"]) for sample in samples]


def _no_cost(row: Mapping[str, Any]) -> str:
    if row["decode_rate"] is None:
        return "no rate"
    return NOTHING_RIGHT if row["answer_match"] == 0 else row["answer_match_reason"] or row["quality_reason"] or NOTHING_RIGHT


def _execution(samples: Sequence[Sample]) -> dict[str, Any]:
    """Outcomes of generated code, where the task runs any."""
    outcomes = [sample["execution"]["outcome"] for sample in samples if sample.get("execution")]
    counted = Counter(outcomes)
    kinds = ("passed", "failed", "error", "timeout", "not_run")
    return {"execution": {kind: counted[kind] for kind in kinds}} if outcomes else {}


def _score(samples: Sequence[Sample]) -> dict[str, Any]:
    """The judge's, where the task has one."""
    asked = [sample for sample in samples if "score" in sample]
    if not asked:
        return {}
    why_not = Counter(sample["score_reason"] for sample in asked if sample["score"] is None)
    return {
        "score": _mean([sample["score"] for sample in asked]),
        "scored": sum(sample["score"] is not None for sample in asked),
        "score_reason": "; ".join(f"{reason} ({count})" for reason, count in why_not.items()) or None,
    }


def _mean(figures: Sequence[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return fmean(known) if known else None
