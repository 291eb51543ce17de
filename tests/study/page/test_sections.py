from __future__ import annotations

import re

import pytest
from fake_study import BASELINE, write_study
from markupsafe import escape

from qurve.study.drawing import heatmap
from qurve.study.page import pieces
from qurve.study.page.build import page
from qurve.study.page.pieces import Numbers, Section, picture
from qurve.study.page.sections import SECTIONS
from qurve.study.results import load


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return load(write_study(tmp_path_factory.mktemp("study")))


@pytest.fixture
def undrawn(monkeypatch):
    monkeypatch.setattr(pieces, "svg", lambda *_, **__: "<svg></svg>")


def test_a_section_is_one_entry_and_one_function(undrawn, results):
    def stability(results):
        return picture(
            "stability",
            lambda width: heatmap([[3.0, None]], ["0.1"], ["1e-3", "2e-3"], row_axis="a", column_axis="b", width=width),
            alt="Loss by rate & decay",
            caption="Crossed: diverged.",
            numbers=Numbers("Loss", ["decay", "1e-3", "2e-3"], [["0.1", "3.0", "diverged"]]),
        )

    text = page(results, [Section("Stability", stability), Section("Ladder", lambda _: None)])
    assert '<figure id="stability"' in text
    assert f'aria-label="{escape("Loss by rate & decay")}"' in text
    assert ">diverged</td>" in text
    titles = re.findall(r'<h2 id="section-\d+">([^<]*)</h2>', text)
    assert titles == [SECTIONS[0].title, "Stability", *(section.title for section in SECTIONS[1:])]
    assert re.findall(r'<li><a href="#section-\d+">([^<]*)</a>', text) == titles


def test_every_figure_has_words_and_numbers_beside_it(undrawn, results):
    text = page(results)
    figures = re.findall(r"<figure.*?</figure>", text, flags=re.DOTALL)
    assert [re.search('id="([^"]*)"', figure)[1] for figure in figures] == ["differences", "curves", "gains", "search"]
    for figure in figures:
        assert figure.count('role="img" aria-label="') == 2
        assert "<figcaption>" in figure
        assert "<details" in figure or "table" in re.search('data-alt="([^"]*)"', figure)[1]


def test_a_table_beside_a_figure_has_the_means(undrawn, results):
    table = re.search(r'<figure id="curves".*?</figure>', page(results), flags=re.DOTALL)[0]
    assert f">{results.arms[2].val_loss:.4f}</td>" in table
    assert "step 400" in table


def test_a_study_without_others_has_no_section_about_them(undrawn, tmp_path):
    text = page(load(write_study(tmp_path, (BASELINE,), search=False)))
    titles = re.findall(r'<h2 id="section-\d+">([^<]*)</h2>', text)
    assert "Gain from the first step on" not in titles
    assert "Paired differences" not in titles
    assert "Learning curves" in titles
