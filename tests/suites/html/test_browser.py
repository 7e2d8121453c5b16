"""The page in a browser: what Chromium draws in light and in dark, and what its parser and the page's script make of it."""

import base64
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.image import imread

from .reading import Element, read
from .test_page import COMMITTED, DECODE, DEMO, KERNELS, SPITE, write
from .test_page import spiteful as spiteful

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")

WIDTH, HEIGHT = 1280, 3600
PLACES = """
const place = (one) => { const box = one.getBoundingClientRect(); return [box.left, box.top, box.right, box.bottom].map(Math.round); };
document.documentElement.dataset.told = JSON.stringify({
  plots: [...document.querySelectorAll("figure svg")].map(place), heading: place(document.querySelector("h1")),
  tables: [...document.querySelectorAll("table.figures")].map(place), wide: document.documentElement.scrollWidth,
  cut: [...document.querySelectorAll("td.figure")].filter((one) => one.scrollWidth > one.clientWidth + 1).length });
"""


@pytest.fixture
def chromium(tmp_path: Path) -> Callable[..., bytes]:
    """Calls the browser, headless, without a network."""

    def call(page: str, *arguments: str, dark: bool = False, width: int = WIDTH) -> bytes:
        file = tmp_path / "page.html"
        file.write_bytes(page.encode())
        done = subprocess.run(
            [
                str(BROWSER),
                *("--headless=new", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1", "--no-first-run"),
                # Its sandbox takes rights that root and containers lack; the page is our own.
                *("--no-sandbox", "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND"),
                *(f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},{HEIGHT}"),
                f"--blink-settings=preferredColorScheme={0 if dark else 1}",
                *arguments,
                file.as_uri(),
            ],
            capture_output=True,
            check=False,
            timeout=120,
            env=os.environ | {"HOME": str(tmp_path)},
        )
        assert done.returncode == 0, done.stderr.decode()[-2000:]
        return done.stdout

    return call


@pytest.fixture
def shot(chromium: Callable[..., bytes], tmp_path: Path) -> Callable[..., np.ndarray]:
    """A picture of the page, [height, width, 3] in 0 to 1."""

    def take(page: str, **how: Any) -> np.ndarray:
        chromium(page, f"--screenshot={tmp_path / 'shot.png'}", **how)
        return np.asarray(imread(tmp_path / "shot.png"))[..., :3]

    return take


def with_script(page: str, script: str) -> str:
    """The page with another script that its policy allows, after its own."""
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return page.replace("script-src '", f"script-src 'sha256-{allowed}' '", 1).replace("</body>", f"<script>{script}</script></body>")


def dom(chromium: Callable[..., bytes], page: str, **how: Any) -> Element:
    return read(chromium(page, "--dump-dom", **how).decode(), written=False)


def places(chromium: Callable[..., bytes], page: str, **how: Any) -> dict[str, Any]:
    (html,) = dom(chromium, with_script(page, PLACES), **how).all("html")
    return json.loads(html.attributes["data-told"])


def crop(picture: np.ndarray, box: list[int]) -> np.ndarray:
    left, top, right, bottom = box
    return picture[top:bottom, left:right]


def variable(page: str, name: str, dark: bool) -> np.ndarray:
    (style,) = read(page).all("style")
    value = style.text.partition("prefers-color-scheme: dark")[2 if dark else 0].partition(f"{name}: #")[2][:6]
    return np.array([int(value[at : at + 2], 16) / 255 for at in (0, 2, 4)])


def share(picture: np.ndarray, colour: np.ndarray) -> float:
    """How much of a picture has a colour."""
    return float((abs(picture - colour).max(axis=-1) < 0.02).mean())


@pytest.mark.parametrize("path", [KERNELS, DECODE, DEMO], ids=lambda path: path.parent.name)
def test_plots_and_text_are_there_in_light_and_in_dark(path: Path, chromium: Callable[..., bytes], shot: Callable[..., np.ndarray]) -> None:
    page = write(path)
    found = places(chromium, page)
    pictures = {dark: shot(page, dark=dark) for dark in (False, True)}
    for dark, picture in pictures.items():
        assert share(picture, variable(page, "--page", dark)) > 0.05
        heading = crop(picture, found["heading"])
        assert 0.002 < share(heading, variable(page, "--ink", dark)) < 0.5
        for box in found["plots"]:
            plot = crop(picture, box)
            ground = share(plot, variable(page, "--card", dark))
            assert 0.4 < ground < 0.98, "neither blank nor a block"
            assert share(plot, variable(page, "--ink", dark)) > 0.001, "axes and text"
            assert share(plot, variable(page, "--grid", dark)) > 0.001
            seen = [number for number in range(6) if share(plot, variable(page, f"--series-{number}", dark)) > 1e-4]
            assert len(seen) >= 2, "markers of several series"
            # No text may be lost in the ground: the axis labels below the plot have both.
            below = plot[int(len(plot) * 0.8) :]
            assert np.ptp(below.mean(axis=-1)) > 0.6
    assert pictures[False].mean() > 0.85 and pictures[True].mean() < 0.2
    assert found["plots"] and found["cut"] == 0


def test_on_a_telephone_tables_scroll_and_the_page_does_not(chromium: Callable[..., bytes]) -> None:
    # Headless Chromium makes no window narrower than 500.
    found = places(chromium, write(*COMMITTED), width=500)
    assert found["wide"] <= 500 and found["cut"] == 0
    assert max(right - left for left, _, right, _ in found["tables"]) > 500


def test_the_browser_reads_texts_as_they_are(spiteful: Path, chromium: Callable[..., bytes]) -> None:
    root = dom(chromium, write(spiteful))
    assert [one.text for one in root.all("pre")].count(SPITE) == 6
    assert [one.text for one in root.all("h2")] == [SPITE]
    assert [row[0] for row in root.all("table", cls="figures")[0].cells()] == ["dense", "teacher-forced", SPITE, "int8"]


def test_a_click_on_a_heading_sorts(chromium: Callable[..., bytes]) -> None:
    page = write(KERNELS)
    (before,) = read(page).all("table", cls="figures")
    column = [one.text for one in before.all("th")].index("us")
    script = f"for (let n = 0; n < CLICKS; n++) document.querySelectorAll('table.figures th button')[{column}].click();"
    figures = sorted(float(row[column]) for row in before.cells() if row[column] != "-")
    missing = sum(row[column] == "-" for row in before.cells())
    assert missing
    for clicks, wanted in ((1, figures), (2, figures[::-1])):
        (after,) = dom(chromium, with_script(page, script.replace("CLICKS", str(clicks)))).all("table", cls="figures")
        shown = [row[column] for row in after.cells()]
        assert [float(one) for one in shown[: len(figures)]] == wanted and shown[len(figures) :] == ["-"] * missing
        assert sorted(after.cells()) == sorted(before.cells())
