"""The spectra as a figure: what is drawn is what was measured, and the page holds it."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from qurve.analysis.hull import HullBound, LayerHull
from qurve.analysis.spectrum import Spectrum
from qurve.study.drawing import svg
from qurve.study.page.geometry import draw_spectra, draw_training, figures, geometry_page, spectra_plot
from qurve.study.worth import Table

BOUND = HullBound(ambient=6, paper=4, tight=3, flat=2)
SPECTRUM = Spectrum((4.0, 0.4, 0.04, 1e-12, 0.0, 0.0), 100)
LAYERS = [LayerHull(layer, BOUND, SPECTRUM, {"query": SPECTRUM}, SPECTRUM, {}) for layer in range(9)]


def test_each_block_has_its_line_and_its_button() -> None:
    plot = spectra_plot(LAYERS)
    assert [trace["name"] for trace in plot["traces"]] == [button["name"] for button in plot["arms"]]
    assert len(plot["traces"]) == 9
    for trace in plot["traces"]:
        assert trace["x"] == [1, 2, 3, 4, 5, 6]
        assert trace["y"] == [0, -1, -2, -7, -7, -7]  # what is rounding lies on the floor
        assert trace["meta"]["arm"] == trace["name"]
    colours = {trace["line"]["color"] for trace in plot["traces"]}
    assert colours == {f"$arm-{n}" for n in range(1, 8)}
    json.dumps(plot, allow_nan=False)


def test_bounds_and_tolerance_are_marked() -> None:
    layout = spectra_plot(LAYERS)["layout"]
    assert sorted(s["x0"] for s in layout["shapes"] if s["x0"] == s["x1"]) == [2.5, 3.5, 4.5]
    assert [s["y0"] for s in layout["shapes"] if s.get("xref") == "paper"] == [math.log10(1e-6)]
    assert [note["text"] for note in layout["annotations"]] == ["linear: 2", "bound: 3", "the paper's: 4"]


@pytest.mark.parametrize("width", [8.8, 3.9])
def test_the_still_picture_has_every_block(width: float) -> None:
    drawn = svg(draw_spectra(LAYERS, width), "test", themed=True)
    assert all(f"block {layer}" in drawn for layer in range(9))
    assert "bound: 3" in drawn


def test_names_of_bounds_that_lie_together_do_not_cover_each_other() -> None:
    for flat, tight, paper, names in (
        (127, 127, 128, ["linear: 127, bound: 127, the paper's: 128"]),
        (127, 191, 256, ["linear: 127", "bound: 191", "the paper's: 256"]),
        (100, 115, 130, ["linear: 100, bound: 115", "the paper's: 130"]),
    ):
        layer = dataclasses.replace(LAYERS[0], bound=HullBound(ambient=384, paper=paper, tight=tight, flat=flat))
        (axes,) = draw_spectra([layer], 8.8).axes
        assert [text.get_text() for text in axes.texts] == names


def test_the_page_is_whole() -> None:
    table = Table("Affine hull", ["block", "rank"], [["0", "3"]], ["A note <of> what it is."])
    page = geometry_page("Geometry of <run>", ["Step 480."], [(480, LAYERS[:2])], [table])
    assert "Geometry of &lt;run&gt;" in page
    assert "A note &lt;of&gt; what it is." in page
    (data,) = re.findall(r'<script type="application/json" data-plot="spectra">(.*?)</script>', page, re.DOTALL)
    assert json.loads(data) == spectra_plot(LAYERS[:2])
    assert '<figure id="spectra"' in page
    assert '<figure id="training"' not in page
    assert list(figures([(480, LAYERS)])) == ["spectra.svg"]
    assert "Plotly" in page


@pytest.mark.parametrize("width", [8.8, 3.9])
def test_training_is_drawn_block_by_block(width: float) -> None:
    start = [dataclasses.replace(hull, qkv=Spectrum((1.0, 1.0, 1.0, 0.0, 0.0, 0.0), 100)) for hull in LAYERS]
    training = [(0, start), (80, LAYERS)]
    bent, ratio = draw_training(training, width).axes
    assert [line.get_label() for line in bent.lines] == [f"block {layer}" for layer in range(9)]
    for axes, first, last in ((bent, 100 / 3, 100 * LAYERS[0].bent), (ratio, 3.0, SPECTRUM.participation_ratio)):
        for line in axes.lines:
            assert list(line.get_xdata()) == [0, 80]
            assert list(line.get_ydata()) == pytest.approx([first, last])
    assert bent.get_yscale() == "log"
    flat = [dataclasses.replace(hull, qkv=Spectrum((1.0, 0.1, 1e-9, 0.0, 0.0, 0.0), 100)) for hull in LAYERS]
    assert draw_training([(0, flat), (80, flat)], width).axes[0].get_yscale() == "linear"
    assert list(figures(training)) == ["spectra.svg", "training.svg"]
    assert '<figure id="training"' in geometry_page("A run", [], training, [])


@pytest.mark.slow
def test_the_page_lives_in_its_own_colours(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(geometry_page("A run", [], [(0, LAYERS)], []), encoding="utf-8")
    page, wrong = browser.new_page(), list[str]()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.goto((tmp_path / "page.html").as_uri())
    page.wait_for_selector("#spectra .live .scatterlayer .trace")
    strokes = "[...document.querySelectorAll('.shapelayer path')].map((path) => path.style.stroke)"
    assert set(page.evaluate(strokes)) == {"rgb(90, 98, 108)"}
    page.get_by_role("button", name="block 3").click()
    page.wait_for_function("document.querySelectorAll('#spectra .scatterlayer .trace').length === 8")
    page.close()
    assert wrong == []
