from __future__ import annotations

import html
import re

import pytest
from fake_study import BASELINE, NONLINEAR, THREE_ARMS, arm, config, grid, searched, write_study

from qurve.study.against import against
from qurve.study.apart import apart_tables, search_table
from qurve.study.headline import headline
from qurve.study.holds import claims_tables, grids, map_table, rates_table, smoothness_table
from qurve.study.markdown import escaped, markdown
from qurve.study.page import pieces
from qurve.study.page.build import page
from qurve.study.results import load


def test_it_holds_verdict_table_and_commands(tmp_path):
    text = markdown(load(write_study(tmp_path)))
    assert text.startswith("## Is a nonlinear query worth it?\n\n**Res. GELU (nonlinear query): lower loss than")
    assert re.search(r"\*\*−0\.05\d\d \\\[−0\.0\d{3}, −0\.0\d{3}\\\]\*\* nats per token, n = 3\.", text)
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("| ")]
    assert [len(rows) for rows in tables[:5]] == [2 + 3, 2 + 2, 2 + 2, 2 + 3, 2 + 4]
    assert all(len({re.sub(r"\\.", "", row).count("|") for row in rows}) == 1 for rows in tables)
    assert re.search(r"\| Res\. GELU .* \| \.\d+ \| \.\d+ \| \.25 \(≥ \.25\) \|", text)
    for title in ("Gains in useful units", "Training saved", "What it costs", "Noise floor and power"):
        assert f"### {title}\n" in text
    assert "2.8736" in text
    assert "```sh\ngit checkout " + "0" * 40 + "\nqurve compare small --seeds 3\n```" in text
    assert "identical batches: shown for every run" in text
    assert text.partition("### Before you believe it\n\n- ")[2].startswith("The search chose on the validation split")
    told = markdown(load(write_study(tmp_path / "tested", searched(*THREE_ARMS))))
    assert "Before you believe it" not in told


def holds(text, table):
    """Whether the Markdown has the table with each of its rows."""
    rows = [" | ".join(escaped(cell) for cell in row) for row in (table.head, *table.rows)]
    return f"### {escaped(table.title)}\n" in text and all(f"| {row} |" in text for row in rows)


def test_what_a_search_found_and_the_arms_differ_in_is_there(tmp_path):
    results = load(write_study(tmp_path))
    text = markdown(results)
    labels = {arm.name: arm.label for arm in results.arms}
    for table in (search_table(results), smoothness_table(results), *apart_tables(results.search, labels)):
        assert holds(text, table)
    assert r"| Res. GELU (nonlinear query) | train.lr 8e-3, train.min\_lr 1.6e-4 | 5.2000 | 10 | 0 | no |" in text
    changed = text.partition("### What differed between the arms\n")[2]
    assert "| arm | model.d\\_ff | train.lr | train.min\\_lr | model.query.kind |" in changed
    assert "| MLP 4.75 | 608 | 4e-3 | 4e-4 | same |" in changed


def test_a_study_of_maps_has_maps_sensitivities_and_claims_first(tmp_path):
    arms = grid(("baseline", "linear"), ("res-gelu", "bottleneck"))
    results = load(write_study(tmp_path, arms, seeds=(1,), fates={(arms[5]["name"], 1): "diverged"}, search=False))
    text, maps = markdown(results), grids(results)
    first, _, by_arm = text.partition("<details><summary>Arm by arm</summary>\n\n")
    for table in (
        *(map_table(results, map_) for map_ in maps.values()),
        rates_table(maps),
        *claims_tables(results, maps),
    ):
        assert holds(first, table)
    assert "1 of 1 diverged" in first
    assert "### What it costs" in by_arm.partition("</details>")[0]


@pytest.mark.parametrize("of_maps", [False, True])
def test_every_table_in_words_of_the_page_is_there(tmp_path, monkeypatch, of_maps):
    """All that the page calls a table has its heading here, so that none is forgotten when one is added."""
    monkeypatch.setattr(pieces, "svg", lambda *_, **__: "<svg></svg>")
    arms = grid(("baseline", "linear"), ("res-gelu", "bottleneck")) if of_maps else THREE_ARMS
    results = load(write_study(tmp_path, arms, search=not of_maps))
    titles = [html.unescape(title) for title in re.findall(r"<h3>([^<]*)</h3>\n<div class=.scroll", page(results))]
    assert len(titles) > 5
    text = markdown(results)
    assert [title for title in titles if f"### {escaped(title)}\n" not in text] == []


def test_doubts_and_missing_runs_are_told(tmp_path):
    text = markdown(load(write_study(tmp_path, fates={("res-gelu", 2): "diverged"}, search=False)))
    assert "### Before you believe it" in text
    assert "- Res. GELU (nonlinear query): seed 2 diverged" in text


def test_a_label_is_no_markup_and_mentions_nobody(tmp_path):
    hostile = "@octocat #12 <img src=x> a|b **bold** [x](y) `c`"
    text = markdown(load(write_study(tmp_path, (BASELINE, arm("new", hostile)), seeds=(1,))))
    bare = re.sub(r"\\.", "", text)
    for mark in ("@", "<", "[x]", "`c`", "**bold**", "#12"):
        assert mark not in bare
    for block in text.split("\n\n"):
        assert len({re.sub(r"\\.", "", row).count("|") for row in block.splitlines() if row.startswith("|")}) <= 1


def test_a_command_cannot_close_its_block(tmp_path):
    folder = write_study(tmp_path, (BASELINE,), seeds=(1,))
    file = folder / "study.json"
    file.write_text(file.read_text().replace("qurve compare small --seeds 3", "qurve compare '```'"))
    assert "````sh\n" in markdown(load(folder))


def test_another_study_gets_its_section(tmp_path):
    here, there = (load(write_study(tmp_path / name)) for name in ("here", "there"))
    text = markdown(here, there, against(here, there))
    assert "### Against small" in text
    assert text.count("the same loss (3 seeds)") == 3
    assert text.count("| no setting |") == 3


def test_another_studys_arms_have_the_settings_that_differ_and_both_ps(tmp_path):
    here = load(write_study(tmp_path / "here", (BASELINE, NONLINEAR)))
    there = load(write_study(tmp_path / "there", (BASELINE, {**NONLINEAR, "config": config(train__lr=1e-3)})))
    text = markdown(here, there, against(here, there)).partition("### Against")[2]
    row = next(line for line in text.splitlines() if line.startswith("| Res. GELU"))
    assert "train.lr 1e-3 → 8e-3" in row
    assert "model.query.kind linear → bottleneck" in row
    assert "model.query.width – → 64" in row
    assert "| p | p Holm | in words | there → here |" in text


@pytest.mark.parametrize(
    ("arms", "fates", "words", "has_number"),
    [
        (THREE_ARMS, {}, "Res. GELU (nonlinear query): lower loss", True),
        (THREE_ARMS, {("res-gelu", 1): "diverged"}, "MLP 4.75: cannot be told apart", True),
        (THREE_ARMS, {("baseline", 1): "running"}, "No verdict on any arm", False),
        (THREE_ARMS[:2], {("mlp-4.75", 1): "diverged"}, "MLP 4.75: no verdict: seed 1 diverged", True),
    ],
    ids=["best", "the best has no verdict", "none has", "one arm"],
)
def test_the_headline_is_of_the_lowest_arm_that_has_a_verdict(tmp_path, arms, fates, words, has_number):
    top = headline(load(write_study(tmp_path, arms, fates=fates)))
    assert top.words.startswith(words)
    assert (top.pair is not None) == has_number
    assert bool(top.caveat) == (top.pair is not None and fates == {})


def test_a_baseline_alone_has_no_headline(tmp_path):
    assert headline(load(write_study(tmp_path, (BASELINE,)))) is None
