"""The HTML page: what stands in it, read back, against the rows of committed runs and against spiteful texts."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from sdbench.errors import SdbenchError
from sdbench.results import read_jsonl
from sdbench.suites.html.page import page
from sdbench.suites.reports import render
from sdbench.suites.runs import read_run

from .reading import Element, read

RESULTS = Path(__file__).parents[3] / "results"
COMMITTED = sorted(file.parent for file in RESULTS.glob("*/*/*/run.json") if file.parts[-4] != "local")
KERNELS, DECODE, DEMO, RANDOM = (RESULTS / "nvidia-h200" / name for name in (
    "kernels/five-patterns", "decode/qwen3-4b", "e2e/demo", "e2e/random-qwen3-4b-16of32"
))  # fmt: skip
SPITE = "\n<script>alert('1')</script> &amp; \"q\" 😀 [b]x[/b] :smile: {{ 7 * 7 }} $x$\r\n</pre>\u2028a\u0085b<!-- \t  end"


def write(*paths: Path) -> str:
    runs = [read_run(path) for path in paths]
    return page([(run, render(run)) for run in runs])


def rows_of(path: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(path / "rows.jsonl") if row["record"] == kind]


def tips(root: Element) -> dict[str, list[tuple[float, ...]]]:
    """By series, the figures that its points tell."""
    found: dict[str, list[tuple[float, ...]]] = {}
    for svg in root.all("svg"):
        for title in svg.all("title"):
            label, *figures = title.text.split("\n")
            found.setdefault(label, []).append(tuple(float(line.rpartition(": ")[2]) for line in figures))
    return found


def six(*figures: float) -> tuple[float, ...]:
    return tuple(float(f"{figure:.6g}") for figure in figures)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_tables_of_committed_runs_are_those_of_the_terminal(path: Path) -> None:
    report = render(read_run(path))
    root = read(write(path))
    (article,) = root.all("article")
    assert [table.cells() for table in article.all("table", cls="figures")] == [
        [list(row) for row in table.cells] for table in (report, *report.more)
    ]
    headings = [[one.text for one in table.all("th")] for table in article.all("table", cls="figures")]
    assert headings == [[column.name for column in table.columns] for table in (report, *report.more)]
    text = article.text
    assert all(line in text for line in (*report.header, *report.lines))


class TestFigures:
    """Recomputed here from the rows, whatever the newest figures are."""

    def test_kernels(self) -> None:
        rows = [row for row in rows_of(KERNELS, "result") if row["us"]]
        root = read(write(KERNELS))
        (table,) = root.all("table", cls="figures")
        shown = {tuple(cells[:4]): cells for cells in table.cells()}
        for row in rows:
            name = row["variant"] + (", sums" if row["kernel"] == "spmv_partial" else "")
            key = (row["layer"], "x".join(map(str, row["of_shape"])), row["pattern"] or "dense")
            cells = shown.get((*key, name)) or shown[(*key, f"{name} *")]
            us = row["us"]
            assert cells[5:7] == [f"{us['p50']:.2f}", f"{us['p20']:.2f}-{us['p80']:.2f}"]
        points = tips(root)
        linear = [row for row in rows if row["variant"] == "linear"]
        assert sorted(points["F.linear"]) == sorted(six(row["bytes"] / 1e6, row["us"]["p50"]) for row in linear)
        for pattern in {row["pattern"] for row in rows if row["kernel"] == "spmv"}:
            of = [row for row in rows if row["kernel"] == "spmv" and row["pattern"] == pattern]
            best = [
                min((row for row in of if row["layer"] == layer), key=lambda row: row["us"]["p50"]) for layer in {r["layer"] for r in of}
            ]
            assert sorted(points[f"fastest SpMV {pattern}"]) == sorted(six(row["bytes"] / 1e6, row["us"]["p50"]) for row in best)
        total = {
            layer: min(row["us"]["p50"] for row in rows if row["layer"] == layer and row["kernel"] == "spmv" and row["pattern"] == "2:4")
            for layer in {row["layer"] for row in rows}
        }
        gain = sum(row["us"]["p50"] for row in linear) / sum(total.values())
        assert f"{gain:.2f}×" in [one.text for one in root.all("strong")]

    def test_decode(self) -> None:
        rows = rows_of(DECODE, "decode")
        root = read(write(DECODE))
        points = tips(root)
        for arm in ("int8", "2:4", "16:32"):
            assert points[arm] == [six(row["context"], row["decode_rate"]["p50"]) for row in rows if row["arm"] == arm]
        assert points["dense, transformers, eager"] == [
            six(128, row["decode_rate"]["p50"]) for row in rows if row["path"] == "transformers, eager"
        ]
        for row in rows:
            for kind, entry in row["profile"].items() if row["profile"] else ():
                ((us,),) = points[f"{row['arm']}, {row['context']}: {kind}"]
                assert us == pytest.approx(entry["us"], rel=1e-5)

    def test_e2e(self) -> None:
        rows = {row["arm"]: row for row in rows_of(DEMO, "arm")}
        root = read(write(DEMO))
        points = tips(root)
        assert set(points) == set(rows) == {"dense", "teacher-forced", "decode", "int8"}
        for arm, row in rows.items():
            assert points[arm] == [six(100 * row["answer_match"] / row["examples"], row["decode_rate"])]
        big = [one.text for one in root.all("strong")]
        assert big == [f"{row['speedup']:.2f}×" for arm, row in rows.items() if arm != "dense"]

    def test_replies_on_which_arms_disagree_come_first(self) -> None:
        samples = read_jsonl(DEMO / "samples.jsonl")
        (table, *_) = read(write(DEMO)).all("article")
        texts = [one.text for one in table.all("pre")]
        ids = [one.text for one in table.all("h4")][:6]
        match = {(one["arm"], one["example"]): one["match"] for one in samples}
        disagreed = [one["example"] for one in samples if one["arm"] == "dense" and not match["decode", one["example"]]]
        assert set(ids) & set(disagreed) and len(texts) == 4 * 6
        assert texts == [one["text"] for name in ids for one in samples if one["example"] == name]


class TestOnePage:
    def test_it_needs_nothing_else(self) -> None:
        text = write(*COMMITTED)
        root = read(text)
        for element in root.everything():
            assert element.name not in ("link", "img", "iframe", "object", "base")
            for name, value in element.attributes.items():
                assert not (name in ("src", "href", "xlink:href") and not value.startswith("#")), value
                assert "url(" not in value.replace("url(#", "")
        (style,), (script,) = root.all("style"), root.all("script")
        assert "url(" not in style.text and "@import" not in style.text
        assert not re.search(r"fetch|XMLHttp|import\(|http", script.text)
        (policy,) = [one.attributes["content"] for one in root.all("meta") if "http-equiv" in one.attributes]
        assert policy.startswith("default-src 'none';")
        assert len(text) < 1_000_000

    def test_ids_are_unique_and_every_reference_has_its_target(self) -> None:
        root = read(write(*COMMITTED, DECODE))
        ids = [element.attributes["id"] for element in root.everything() if "id" in element.attributes]
        assert len(ids) == len(set(ids))
        told = " ".join(value for element in root.everything() for value in element.attributes.values())
        references = {*re.findall(r"url\(#([^)]+)\)", told), *(
            element.attributes[name][1:] for element in root.everything() for name in ("href", "xlink:href") if name in element.attributes
        )}  # fmt: skip
        assert len(references) > 10 and references <= set(ids)

    def test_plots_take_their_colours_from_the_page(self) -> None:
        root = read(write(*COMMITTED))
        styles = [element.attributes.get("style", "") for svg in root.all("svg") for element in svg.everything()]
        assert not [style for style in styles if "#" in style.replace("url(#", "")]
        used = set(re.findall(r"var\((--[a-z0-9-]+)\)", " ".join(styles)))
        (style,) = root.all("style")
        light, _, dark = style.text.partition("prefers-color-scheme: dark")
        for name in used:
            values = [re.findall(rf"{name}: (#[0-9a-f]+)", part)[0] for part in (light, dark)]
            assert values[0] != values[1], name

    def test_the_same_runs_give_the_same_page(self) -> None:
        assert write(DEMO, KERNELS) == write(DEMO, KERNELS)

    def test_several_runs_have_an_overview(self) -> None:
        root = read(write(*COMMITTED))
        (nav,) = root.all("nav")
        assert [row[0] for row in nav.all("table")[0].cells()] == [str(path) for path in COMMITTED]
        assert [link.attributes["href"][1:] for link in nav.all("a")] == [one.attributes["id"] for one in root.all("article")]
        assert read(write(DEMO)).all("nav") == []

    def test_what_was_run(self) -> None:
        root = read(write(DECODE))
        told = dict(zip((one.text for one in root.all("dt")), (one.text for one in root.all("dd")), strict=True))
        record = json.loads((DECODE / "run.json").read_text())
        gpu, git = record["environment"]["gpu"], record["git"]
        wanted = {"context": "128, 2048, 8192, 32768", "tokens": "256", "revision": "null", "profile": "true", "triton": "3.6.0"}
        assert wanted.items() <= told.items()
        assert (told["gpu driver"], told["commit"], told["created"]) == (gpu["driver"], git["commit"], record["created"])


@pytest.fixture
def spiteful(tmp_path: Path) -> Path:
    """The committed demo run with names and texts that break pages."""
    folder = tmp_path / "run <b>&amp;"
    folder.mkdir()
    record = json.loads((DEMO / "run.json").read_text())
    record["arguments"]["model"] = SPITE
    record |= {"outcome": "failed", "outcome_reason": SPITE}
    rows = [row | {"arm": SPITE} if row.get("arm") == "decode" else row for row in read_jsonl(DEMO / "rows.jsonl")]
    samples = [
        one | {"text": SPITE, "extracted": "007", "arm": SPITE} if one["arm"] == "decode" else one
        for one in read_jsonl(DEMO / "samples.jsonl")
    ]
    (folder / "run.json").write_text(json.dumps(record))
    for name, lines in (("rows.jsonl", rows), ("samples.jsonl", samples)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_texts_survive_as_they_are(spiteful: Path) -> None:
    """CASES 19, 20 and 23."""
    text = write(spiteful)
    assert "\r" not in text and "\x00" not in text
    root = read(text)
    assert len(root.all("script")) == 1 and root.all("script")[0].text.startswith("// A click")
    assert [one.text for one in root.all("pre")].count(SPITE) == 6
    assert [one.text for one in root.all("h2")] == [SPITE]
    table, *_ = root.all("table", cls="figures")
    assert [row[0] for row in table.cells()] == ["dense", "teacher-forced", SPITE, "int8"]
    assert "answer 007" in root.text and str(spiteful) in root.text
    # In a plot, XML has no place for one of its characters.
    (svg,) = root.all("svg")
    labels = [one.text for one in svg.all("text")]
    assert any("<script>alert('1')</script> &amp;" in label and "😀 [b]x[/b]" in label and "$x$" in label for label in labels)


def test_half_of_a_surrogate_pair_and_a_nul_are_shown(spiteful: Path) -> None:
    samples = [one | {"text": "a\ud83db\x00c"} for one in read_jsonl(spiteful / "samples.jsonl")]
    (spiteful / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in samples))
    text = write(spiteful)
    assert text.encode()
    assert {one.text for one in read(text).all("pre")} == {"a\ufffdb\u2400c"}


class TestMissing:
    def test_a_null_figure_has_its_reason(self) -> None:
        root = read(write(RANDOM))
        assert root.all("svg") == []
        (plot,) = root.all("figure")
        assert "No plot: random weights: replies mean nothing" in plot.text
        (missing,) = root.all("details", cls="missing-figures")
        told = dict(zip((one.text for one in missing.all("dt")), (one.text for one in missing.all("dd")), strict=True))
        no_text = "random weights: replies mean nothing, so that only speed is measured"
        assert told == {
            "quality": f"{no_text} (dense; teacher-forced; decode; int8)",
            "length ratio": "no replies (dense; teacher-forced; decode; int8)",
            "speedup": "this arm is the baseline (dense)",
            "net speedup": "no replies (teacher-forced; decode; int8)",
            "seconds per correct": f"{no_text} (dense; teacher-forced; decode; int8)",
        }

    @pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
    def test_no_null_is_too_much(self, path: Path, tmp_path: Path) -> None:
        """Every figure of every row null, one field at a time, with what comes of it: the page says less, and is there."""
        rows = read_jsonl(path / "rows.jsonl")
        run = read_run(path)
        may = {
            *("us", "gbps", "roofline", "error", "decode_rate", "decode_rate_spread", "speedup", "answer_match", "eos", "truncated"),
            *("ceiling", "peak_bytes", "profile", "ms_per_token", "ttft_ms", "step_bytes", "of_ceiling", "kernels", "memory"),
        }
        with_it: dict[str, dict[str, Any]] = {
            "us": {"gbps": None, "roofline": None, "us_reason": "none"},
            "decode_rate": {"decode_rate_spread": None, "ms_per_token": None},
            "answer_match": {"graded": 0},
            "eos": {"examples": 0},
        }
        for field in sorted(name for name in may if any(name in row for row in rows)):
            null = {field: None} | with_it.get(field, {})
            spoilt = [row | null if field in row and row["record"] != "chain" else row for row in rows]
            folder = tmp_path / field
            folder.mkdir()
            (folder / "run.json").write_text((path / "run.json").read_text())
            (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in spoilt))
            root = read(write(folder))
            assert root.all("article") and "None" not in root.text.replace(str(run.path), ""), field

    def test_nothing_measured_yet(self, tmp_path: Path) -> None:
        for path in (KERNELS, DECODE, DEMO):
            folder = tmp_path / path.parent.name
            folder.mkdir()
            record = json.loads((path / "run.json").read_text()) | {"outcome": "interrupted", "outcome_reason": "Ctrl-C"}
            (folder / "run.json").write_text(json.dumps(record))
            root = read(write(folder))
            assert "NOT A COMPLETE RUN (Ctrl-C)" in root.text and "Nothing is measured yet" in root.text and root.all("svg") == []

    def test_rows_that_cannot_be_drawn(self, tmp_path: Path) -> None:
        (tmp_path / "run.json").write_text((KERNELS / "run.json").read_text())
        rows = [{name: value for name, value in row.items() if name != "bytes"} for row in read_jsonl(KERNELS / "rows.jsonl")]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        with pytest.raises(SdbenchError, match="rows that cannot be drawn \\(KeyError: 'bytes'\\)"):
            write(tmp_path)
