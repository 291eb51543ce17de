from __future__ import annotations

import re

import pytest
from fake_study import BASELINE, THREE_ARMS, arm, searched, write_study

from qurve.study.against import against
from qurve.study.headline import headline
from qurve.study.markdown import markdown
from qurve.study.results import load


def test_it_holds_verdict_table_and_commands(tmp_path):
    text = markdown(load(write_study(tmp_path)))
    assert text.startswith("## Is a nonlinear query worth it?\n\n**Res. GELU (nonlinear query): lower loss than")
    assert re.search(r"\*\*−0\.05\d\d \\\[−0\.0\d{3}, −0\.0\d{3}\\\]\*\* nats per token, n = 3\.", text)
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("| ")]
    assert [len(rows) for rows in tables] == [2 + 3, 2 + 2, 2 + 2, 2 + 3, 2 + 4]
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
