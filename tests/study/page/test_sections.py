from __future__ import annotations

import json
import re

import pytest
from fake_study import BASELINE, arm, grid, record, write_study
from markupsafe import escape

from qurve.study.drawing import heatmap
from qurve.study.page import pieces
from qurve.study.page.build import page
from qurve.study.page.pieces import Numbers, Section, picture
from qurve.study.page.plots import PLOTS
from qurve.study.page.sections import SECTIONS
from qurve.study.results import load

OF_MAPS = ("Stability over rate and decay", "Published claims of stability")
"""Sections of studies alone that have a grid of rates and decays."""
OF_SOME = (*OF_MAPS, "Likelihood tasks", "Dynamics", "Looked into")
"""Sections that not every study has."""


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
    own = [section.title for section in SECTIONS if section.title not in OF_SOME]
    assert titles == [own[0], "Stability", *own[1:]]
    assert re.findall(r'<li><a href="#section-\d+">([^<]*)</a>', text) == titles


def test_no_text_ends_the_element_that_holds_a_figures_numbers(undrawn, results, monkeypatch):
    tree = {"a": "</script><script>alert(1)</script>", "b": "<!-- & -->", "c": "é\u2028"}
    monkeypatch.setitem(PLOTS, "curves", lambda _: tree)
    text = page(results)
    held = re.search(r'<script type="application/json" data-plot="curves">(.*?)</script>', text, flags=re.DOTALL)[1]
    assert json.loads(held) == tree
    assert not set("<>&") & set(held)


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


def test_a_grid_of_rates_and_decays_becomes_maps_and_judges_the_claims(undrawn, tmp_path):
    arms = grid(("baseline", "linear"), ("res-gelu", "bottleneck"))
    fates = {("res-gelu@0.008-0.05", 1): "diverged"}
    text = page(load(write_study(tmp_path, arms, seeds=(1,), fates=fates, search=False)))
    for name in ("map-1", "map-2"):
        assert f'<figure id="{name}"' in text
    words = " ".join(re.sub("<[^>]*>", " ", text).split())
    assert "1 of 1 diverged, spikes 0.0" in words
    assert re.search(r"Res-Gelu 0\.05 2e-3 2e-3 \d\.\d{4} ", words)
    assert "Res-Gelu 0.1 8e-3 (the largest tried)" in words
    said, _, inferred = words.partition("What we infer from it, and what is seen here")
    claim = "Baseline 1 0.05 said to diverge: diverges before step 20,000 of 60,000 at this decay"
    seen = "not tested at its length: stable so far 1 400 one seed finished 400 steps"
    assert f"{claim} (arXiv 2603.13381, section 2.2) {seen}" in said
    assert "Runs that are shorter than a claim speaks of can show a divergence; they test neither" in said
    assert inferred.count("inferred to diverge") == 3
    assert "confirmed" not in words
    assert "refuted" not in words


def titles_of(text):
    return re.findall(r'<h2 id="section-\d+">([^<]*)</h2>', text)


def cards_of(text):
    """Labels of the cards that stand open, and of those that are folded away."""
    top = text[: text.index("<nav")]
    folded = "".join(re.findall(r'<details class="fold">.*?</details>', top, flags=re.DOTALL))
    every, away = (re.findall(r'<span class="dot"></span>([^<]*)</h3>', part) for part in (top, folded))
    return [label for label in every if label not in away], away


def test_a_study_of_maps_is_read_by_its_maps(undrawn, tmp_path, monkeypatch):
    scales = []
    monkeypatch.setattr("qurve.study.page.pieces.svg", lambda draw, *_, **__: "<svg></svg>")
    monkeypatch.setattr("qurve.study.page.stability.heatmap", lambda *_, scale, **__: scales.append(scale))
    arms = grid(("baseline", "linear"), ("res-gelu", "bottleneck"), ("identity", "identity"), ("other", "linear"))
    results = load(write_study(tmp_path, arms, seeds=(1,), search=False))
    text = page(results)
    assert titles_of(text)[:2] == list(OF_MAPS)
    assert cards_of(text) == ([], [arm.label for arm in results.others])
    assert "15 arms without a verdict, each with its reason" in text
    sections = dict(zip(titles_of(text), re.split(r'<h2 id="section-\d+">', text)[1:], strict=True))
    for section in SECTIONS:
        if section.title in sections:
            assert ('<details class="fold"><summary>Arm by arm' in sections[section.title]) == section.by_arm
    losses = [run.final_loss for run in results.runs]
    assert set(scales) == {(min(losses), max(losses))}
    assert sections[OF_MAPS[0]].count("on one scale for all maps of this page") == 4


def test_few_points_of_a_map_fold_nothing_away(undrawn, tmp_path):
    text = page(load(write_study(tmp_path, grid(("baseline", "linear")), seeds=(1,), search=False)))
    assert len(cards_of(text)[0]) == 3
    assert "Arm by arm" not in text


def test_of_many_arms_those_without_a_verdict_are_folded_away(undrawn, tmp_path):
    arms = (BASELINE, *(arm(f"v{i}", f"V {i}", 0.01 * i) for i in range(13)))
    text = page(load(write_study(tmp_path, arms, fates={("v3", 1): "diverged", ("v5", 2): "running"})))
    shown, away = cards_of(text)
    assert away == ["V 3", "V 5"]
    assert len(shown) == 11
    assert "Arm by arm" not in text


@pytest.mark.parametrize("seeds", [(1,), (1, 2, 3)])
@pytest.mark.parametrize("fate", ["finished", "diverged", "missing"])
def test_no_table_has_a_row_or_a_column_of_dashes_alone(undrawn, tmp_path, seeds, fate):
    fates = {("new", seed): fate for seed in seeds} if fate != "finished" else {}
    text = page(load(write_study(tmp_path, (BASELINE, arm("new", "New", 0.1)), seeds=seeds, fates=fates)))
    for name in ("worth", "saved"):
        table = re.search(rf'<table id="{name}".*?</table>', text, flags=re.DOTALL)
        if table is None:
            assert "Not one number is known" in text
            continue
        rows = [re.findall(r"<td[^>]*><span>([^<]*)", row) for row in table[0].split("<tr>")[2:]]
        for line in (*rows, *zip(*rows, strict=True)):
            assert any(cell != "–" for cell in line)
    assert ("Known of no arm: bits per byte" in text) == (fate == "finished")


def test_other_studies_have_no_map_and_their_spikes_and_logits(undrawn, tmp_path, results):
    text = page(results)
    assert 'id="map-1"' not in text
    assert 'id="claims"' not in text
    words = " ".join(re.sub("<[^>]*>", " ", text[text.index('id="smoothness"') :]).split())
    assert re.search(r"Baseline 3 0.0 0 – ", words)


def test_dynamics_are_a_figure_a_kind_with_numbers(undrawn, tmp_path):
    write_study(tmp_path, (BASELINE, arm("new", "New")), seeds=(1, 2), search=False)
    for seed in (1, 2):
        record(tmp_path, "new", seed, {"query.f_to_x": [None, 0.5 * seed], "key.norm": [1.0, 2.0]})
    text = page(load(tmp_path))
    assert re.findall(r'<figure id="(dynamics-[a-z]*)"', text) == ["dynamics-norms", "dynamics-f"]
    assert re.findall(r'data-plot="(dynamics-[a-z]*)"', text) == ["dynamics-norms", "dynamics-f"]
    words = " ".join(re.sub("<[^>]*>", " ", text).split())
    assert "New, Q, block 1 0.76 1.75 2.75 3.75 4.75" in words
    assert "Solid: W_K." in words
    assert "New, Q, block 0" not in words


def test_pages_of_the_study_and_of_single_runs_are_led_to(undrawn, tmp_path):
    write_study(tmp_path, (BASELINE, arm("new", "New")), seeds=(1, 2), search=False)
    pages = tmp_path / "runs" / "new" / "seed-2" / "analysis"
    pages.mkdir()
    for name in ("mechanism.html", "geometry.html", "geometry.json"):
        (pages / name).touch()
    for places in (["New, seed 2"], ["All arms", "New, seed 2"]):
        text = page(load(tmp_path))
        section = re.search(r"Looked into</h2>(.*?)</section>", text, flags=re.DOTALL)[1]
        links = re.findall(r'<a href="([^"]*)">([^<]*)</a>', section)
        assert [name for _, name in links] == [*["geometry"] * (len(places) - 1), "geometry", "mechanism"]
        assert all((tmp_path / "report" / link).resolve().exists() for link, _ in links)
        assert re.findall(r"<li>([^<:]*):", section) == places
        (tmp_path / "analysis").mkdir(exist_ok=True)
        (tmp_path / "analysis" / "geometry.html").touch()


def test_worth_costs_and_noise_are_told_with_what_is_not_known(undrawn, results):
    text = page(results)
    for table in ("worth", "saved", "costs", "noise"):
        assert f'<table id="{table}"' in text
    words = " ".join(re.sub("<[^>]*>", " ", text).split())
    assert "every arm: the manifest of the data is not at hand" in words
    assert "900,000 (+12.5 %)" in words
    assert "Minimum detectable effect with 3 seeds and 80 % power" in words
    assert re.search(r"to see 0\.2 % takes \d+ seeds; 0\.5 % takes \d+ seeds; 1 % takes \d+ seeds", words)
