"""``sdbench e2e``: the whole answer in one table."""

import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from sdbench.cli.calibration import ABOUT_CALIBRATION, METHODS, SOURCES, calibration_options
from sdbench.cli.options import (
    DEMO_MAX_TOKENS,
    MAX_TOKENS,
    SPREAD,
    Checked,
    device_map_option,
    device_option,
    is_checking,
    json_option,
    min_speedup_option,
    model_dtype_option,
    model_option,
    output_option,
    run_directory,
)
from sdbench.cli.printing import print_report
from sdbench.cli.profiles import changed, given_options, is_given, profile_option, unused_prompt_tokens
from sdbench.cli.tasks import find_data, task_options

if TYPE_CHECKING:
    from sdbench.suites.e2e.profiles import Profile

FILE = click.Path(path_type=Path)


@click.command("e2e")
@profile_option
@click.option(
    "--calib",
    "calib",
    multiple=True,
    default=["decode"],
    show_default=True,
    help=f"Calibration source to judge: {SOURCES}; may be repeated. teacher-forced is the control and always judged.",
)
@model_option
@click.option("--revision", help="Revision of a hub model.")
@click.option("--pattern", default="2:4", show_default=True, help="N:M, N kept of M.")
@click.option("--method", default="wanda", show_default=True, help=f"{METHODS}.")
@click.option(
    "--prefill",
    type=click.Choice(["pruned", "dense"]),
    default="pruned",
    show_default=True,
    help="Weights that the prompt runs on in pruned arms.",
)
@task_options
@click.option("--train", type=FILE, help="Calibration examples, JSONL with question and answer, in place of --data.")
@click.option("--validation", type=FILE, help="Judged examples.")
@click.option("--split-manifest", type=FILE, help="Manifest of both files, from 'sdbench split'.")
@click.option("--dataset-revision", help="Refuse a manifest that names another revision.")
@click.option("--calibration-examples", type=int, default=16, show_default=True, help="Examples of --train to calibrate on.")
@click.option("--validation-examples", type=int, default=50, show_default=True, help="Examples of --validation to judge.")
@click.option(
    "--max-tokens", type=int, help=f"Longest reply of an answer run.  [default: {MAX_TOKENS}; {DEMO_MAX_TOKENS} for the demo model]"
)
@click.option("--equal-tokens", type=int, default=128, show_default=True, help="Exact length of the timed runs, on every arm.")
@click.option("--warmup-tokens", type=int, default=8, show_default=True, help="Tokens decoded before timing.")
@click.option("--rate-repeats", type=int, default=3, show_default=True, help="Timed runs an arm; the median counts. 0: no speed.")
@click.option(
    "--compile-baseline/--no-compile-baseline",
    default=True,
    show_default=True,
    help="On a GPU, also time the dense model under torch.compile, which takes a minute to compile.",
)
@click.option("--prompt-tokens", type=int, default=128, show_default=True, help="Prompt length for a random: model.")
@click.option("--batch-size", type=int, default=16, show_default=True, help="Calibration replies decoded at once.")
@calibration_options
@click.option("--targets", multiple=True, help="Pattern of linears to prune, such as '*.mlp.*' or down_proj; all when left out.")
@click.option("--ignore", multiple=True, help="Pattern of linears to leave dense.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of every draw.")
@model_dtype_option
@device_option
@device_map_option
@click.option("--allow-code-execution", is_flag=True, help="Run generated classes against their tests (classeval), locked away.")
@click.option("--judge-url", help="OpenAI-compatible endpoint that scores texts (writingbench), such as http://localhost:8000/v1.")
@click.option("--judge-model", help="The judge's name there; its key, if it wants one, goes into $SDBENCH_JUDGE_KEY.")
@click.option("--fidelity", flag_value="also", default="no", help="Also compare each pruned arm with the dense model, token by token.")
@click.option("--fidelity-only", "fidelity", flag_value="only", help="Judge pruned arms by fidelity alone: no answers of theirs, no rates.")
@click.option(
    "--diagnose", is_flag=True, help="Also measure, in each layer, what calibration misses of the decode steps and what pruning costs."
)
@click.option("--plot", type=FILE, help="Write the layers' plot of --diagnose, .png, .svg or .pdf; needs matplotlib (extra 'plots').")
@click.option(
    "--alternatives/--no-alternatives",
    default=None,
    help="Also judge what needs no pruning: the model with int8 weights.  [default: on a GPU, where int8 has a kernel]",
)
@click.option("--compare-model", help="Another dense model to judge on the same questions, such as a smaller one; named as for --model.")
@click.option("--compare-revision", help="Its revision on the hub.")
@click.option("--lm-eval", multiple=True, help="Also judge every arm on this task of lm-evaluation-harness (extra 'lm-eval'); repeatable.")
@click.option("--lm-eval-path", type=FILE, help="Folder of the harness's task files of your own.")
@click.option("--lm-eval-limit", type=int, help="Examples a task of the harness at most.  [default: all]")
@min_speedup_option("Exit with 4 when a pruned arm is not this many times as fast as dense.")
@output_option
@json_option
def command(
    calib: tuple[str, ...],
    model: str | None,
    revision: str | None,
    profile: "Profile | None",
    max_tokens: int | None,
    device: str,
    dtype: str,
    pattern: str,
    task: str | None,
    data: Path | None,
    fidelity: str,
    alternatives: bool | None,
    compare_model: str | None,
    compare_revision: str | None,
    lm_eval: tuple[str, ...],
    lm_eval_path: Path | None,
    lm_eval_limit: int | None,
    judge_url: str | None,
    judge_model: str | None,
    plot: Path | None,
    min_speedup: float | None,
    output: Path | None,
    as_json: bool,
    **rest: object,
) -> None:
    """Calibrate, prune, decode and judge: dense, control and chosen arms in one table.

    The dense model answers calibration questions by itself; its decode steps (or another --calib) choose the weights that stay; decode
    steps of the pruned arms run through a bitmask SpMV. Quality comes from answer runs, speed from runs of equal length, through one loop.

    \b
    sdbench e2e --calib decode
    sdbench e2e --calib decode --calib self --pattern 16:32 --prefill dense
    sdbench e2e --calib text --calibration-text c4.jsonl --sequential
    sdbench e2e --calib decode+sink --fidelity-only --diagnose --plot layers.png
    sdbench e2e --model random:Qwen/Qwen3-4B-Instruct-2507 --equal-tokens 256
    sdbench e2e --task gsm8k --compare-model Qwen/Qwen3-1.7B
    sdbench e2e --task classeval --data ClassEval_data.json --allow-code-execution
    sdbench e2e --lm-eval arc_easy --lm-eval-limit 200
    sdbench e2e --profile seed
    sdbench e2e --profile paper --pattern 16:32 --model Qwen/Qwen3-14B
    sdbench split train.jsonl --output data
    sdbench e2e --model model.gguf --train data/train.jsonl \\
        --validation data/validation.jsonl --split-manifest data/manifest.json
    """
    from sdbench.devices import require_gpu, resolve_device, resolve_dtype
    from sdbench.environment import describe
    from sdbench.errors import CheckFailed, ExitCode, SdbenchError, UsageError
    from sdbench.models import require_model, resolve_model
    from sdbench.pattern import Pattern
    from sdbench.progress import Progress
    from sdbench.results import strict_json, write_atomic
    from sdbench.suites.e2e.data import load
    from sdbench.suites.e2e.harness import HarnessTasks
    from sdbench.suites.e2e.options import E2EOptions
    from sdbench.suites.e2e.plot import draw
    from sdbench.suites.e2e.report import report, require_some, wrong_calls
    from sdbench.suites.e2e.suite import run
    from sdbench.suites.plots import check_plot, save_plot
    from sdbench.suites.runs import origins
    from sdbench.suites.tasks.endpoint import Judge

    target = resolve_device(device)
    if is_given("model") and not is_given("revision"):
        # A profile's is of its own model.
        revision = None
    spec = resolve_model(model, revision, target)
    chosen, data = find_data(task, data, split=rest["train"] is not None)
    if max_tokens is None:
        max_tokens = DEMO_MAX_TOKENS if spec.kind == "demo" else (chosen and chosen.max_tokens) or MAX_TOKENS
    if chosen and chosen.grader == "none" and fidelity == "no":
        # It is all that such a task has to say.
        fidelity = "also"
    if fidelity == "only" and is_given("rate_repeats"):
        raise UsageError("--fidelity-only times nothing; leave out --rate-repeats, or take --fidelity")
    if min_speedup is not None and (fidelity == "only" or not rest["rate_repeats"]):
        option, other = ("--fidelity-only", "take --fidelity") if fidelity == "only" else ("--rate-repeats 0", "ask for some repeats")
        raise UsageError(f"{option} times nothing; leave out --min-speedup, or {other}")
    if compare_revision and compare_model is None:
        raise UsageError("--compare-revision is of --compare-model; name that too")
    if (judge_url is None) != (judge_model is None):
        raise UsageError("--judge-url and --judge-model go together: an endpoint, and the model there that judges")
    if not lm_eval and (lm_eval_path or lm_eval_limit is not None):
        raise UsageError("--lm-eval-path and --lm-eval-limit are of --lm-eval; name a task with it")
    harness = HarnessTasks(lm_eval, lm_eval_path, lm_eval_limit) if lm_eval else None
    if harness:
        harness.check()
    options = E2EOptions(
        spec=spec,
        device=target,
        dtype=resolve_dtype(dtype, target),
        pattern=Pattern.parse(pattern),
        calib=calib,
        max_tokens=max_tokens,
        chosen_task=chosen,
        data=data,
        fidelity=fidelity,  # type: ignore[arg-type]  # click checked them
        judge=Judge(judge_url, judge_model) if judge_url and judge_model else None,
        harness=harness,
        profile=profile.label if profile else None,
        profile_changed=changed(),
        alternatives=target.type == "cuda" if alternatives is None else alternatives,
        rival=resolve_model(compare_model, compare_revision, target) if compare_model is not None else None,
        **rest,  # type: ignore[arg-type]  # click checked them
    )
    if options.device_map:
        require_gpu(target, device, SPREAD)
    if plot:
        if not options.diagnose:
            raise UsageError("--plot draws what --diagnose measures; give both")
        check_plot(plot)
    # A note and no refusal: all runs of a grid have its common options.
    unused = given_options(ABOUT_CALIBRATION) if not options.sources else []
    # Before anything is created or loaded: a wrong file leaves no trace.
    examples = load(options)
    if is_checking():
        # A run says so itself, once it has begun and loads it; runs of a grid would do so one by one.
        for model_asked in filter(None, (spec, options.rival)):
            require_model(model_asked)
        raise Checked(options.arguments())
    environment = describe(target if target.type == "cuda" else None)
    output = output or Path("results/local/e2e") / f"{datetime.now():%Y%m%d-%H%M%S-%f}"
    with run_directory(output, "e2e", options.arguments(), environment) as directory, Progress() as progress:
        progress.note(f"model: {spec.name} ({spec.reason})")
        if unused:
            change = "changes" if len(unused) == 1 else "change"
            progress.note(f"--method {options.method} needs no calibration: {', '.join(unused)} {change} nothing")
        for line in unused_prompt_tokens(spec.kind):
            progress.note(line)
        outcome = run(options, examples, directory, progress)
        if directory:
            directory.add_row({"record": "model", "model": spec.name, "reason": spec.reason})
        found = report(options.arguments(), environment, outcome.arms, outcome.calibration, str(output), spec.reason, outcome.layers)
        found = replace(found, header=origins(directory))
        write_atomic(output / "report.md", found.markdown())
        if plot:
            save_plot(plot, draw(outcome.layers, f"{spec.name}, {options.pattern}, {options.method}"))
        wrong = wrong_calls(outcome.arms)
        if wrong:
            raise CheckFailed("; ".join(wrong))
    if as_json:
        sys.stdout.write(strict_json(found.document, indent=2) + "\n")
    else:
        print_report(found)
        print(f"run directory: {output}")
    require_some(outcome.arms)
    slow = [arm for arm in outcome.arms if arm["pattern"] and (arm["speedup"] or 0.0) < (min_speedup or 0.0)]
    if slow:
        reached = ", ".join(f"{arm['arm']} {arm['speedup']:.2f}" if arm["speedup"] else f"{arm['arm']} without a speed-up" for arm in slow)
        raise SdbenchError(f"slower than --min-speedup {min_speedup:g}: {reached}", ExitCode.SLOWER)
