"""A searched study is compared on the test split, and its arms at the baseline's point are a question of their own."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest
from fake_study import BASELINE, NONLINEAR, WIDER, searched, write_study
from rich.console import Console
from test_report import text_of

from qurve.study.against import against
from qurve.study.evidence import compact_evidence, evidence_json
from qurve.study.headline import headline
from qurve.study.ladder_results import measured
from qurve.study.markdown import markdown
from qurve.study.noise import known_evidence, noise_floor
from qurve.study.paired import holm
from qurve.study.power import detectable, minimum_detectable
from qurve.study.report import write_report
from qurve.study.results import StudyResults, load
from qurve.study.statistics import comparisons, overall_verdict, summary_rows
from qurve.study.tables import csv_table, terminal_table, tex_table

SEEDS = (1, 2, 3)
WORSE = {seed: 4.25 + seed / 1000 for seed in SEEDS}
"""The nonlinear query's losses on the test split: above all others, though its validation losses are the lowest."""
FIXED = ("baseline", "mlp-4.75", "res-gelu", "mlp-4.75@baseline", "res-gelu@baseline")
ARMS = searched(BASELINE, WIDER, {**NONLINEAR, "test": WORSE})


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> StudyResults:
    return load(write_study(tmp_path_factory.mktemp("study"), ARMS))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qurve.study.page.pieces.svg", lambda *_, **__: "<svg></svg>")
    monkeypatch.setattr("qurve.study.drawing.svg", lambda *_, **__: "<svg></svg>")
    monkeypatch.setattr("qurve.study.drawing.png", lambda _: b"")


def test_every_table_has_the_loss_that_is_compared(results: StudyResults) -> None:
    shown, hidden = f"{sum(WORSE.values()) / 3:.4f}", f"{results.arms[2].val_loss:.4f}"
    rows = summary_rows(results)
    assert [row["arm"] for row in rows] == list(FIXED)
    assert {row["split"] for row in rows} == {"test"}
    assert f"{rows[2]['final_loss']:.4f}" == shown
    assert f"{rows[2]['val_loss']:.4f}" == hidden
    assert rows[2]["diff"] == pytest.approx(rows[2]["final_loss"] - rows[0]["final_loss"])
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(terminal_table(results))
    for text in (tex_table(results), markdown(results), console.export_text()):
        assert shown in text
        assert hidden not in text
        assert "test loss" in text.lower()
        assert "val loss" not in text.lower()
        assert "At the baseline's best point" in text
    (line,) = (line for line in csv.DictReader(io.StringIO(csv_table(results))) if line["arm"] == "res-gelu")
    assert float(line["final_loss"]) == rows[2]["final_loss"]


def test_the_page_shows_both_and_compares_the_test_losses(undrawn: None, tmp_path: Path) -> None:
    page = write_report(write_study(tmp_path, ARMS))
    text = text_of(page)
    for words in (
        "Mean difference in test loss to the baseline",
        "Test loss",
        "val loss at end test loss at end",
        "4.2520",
        "Losses are on the test split; the search chose on the validation split.",
        "At the baseline's best point: a family of tests of its own",
        "Higher loss than the baseline by 0.",
        "train.lr 8e-3, train.min_lr 1.6e-4",  # what was chosen
    ):
        assert words in text, words
    source = page.read_text(encoding="utf-8")
    summary = source[source.index('id="summary"') : source.index('id="differences"')]
    own = re.sub(r'<tr class="sub paper">.*?</tr>', "", summary, flags=re.DOTALL)
    assert "val loss" not in own.lower()
    assert "val loss" in summary  # of the paper's rows, which are on validation


def test_arms_at_the_baselines_point_are_a_family_of_their_own(results: StudyResults) -> None:
    found = {pair.arm: pair for pair in comparisons(results)}
    for family in (("mlp-4.75", "res-gelu"), ("mlp-4.75@baseline", "res-gelu@baseline")):
        assert [found[arm].p_holm for arm in family] == holm([found[arm].p for arm in family])
    assert "after Holm for 2 arms" in found["res-gelu"].verdict
    words = overall_verdict(results)
    own, matched = words.split("At the baseline's best point, a family of tests of its own:")
    assert "settings of Baseline" not in own
    assert matched.count("settings of Baseline") == 2
    assert "comparing 2 arms with one baseline" in words


def test_power_and_noise_are_of_the_first_comparison_alone(results: StudyResults) -> None:
    floor = noise_floor(results)
    assert floor is not None
    assert floor.differences is not None
    assert [one.arm for one in floor.arms] == ["mlp-4.75", "res-gelu"]
    assert floor.base_loss == pytest.approx(results.baseline.final_loss)
    found = detectable(results)
    assert found is not None
    assert found[0] == pytest.approx(minimum_detectable(3, floor.differences.value, arms=2))


def test_no_arm_at_the_baselines_point_makes_the_headline(tmp_path: Path) -> None:
    """Lower than all others there, it is no more than a control."""
    arms = tuple({**a, "test": dict.fromkeys(SEEDS, 3.0)} if a.get("matched") == "res-gelu" else a for a in ARMS)
    results = load(write_study(tmp_path, arms))
    top = headline(results)
    assert top is not None
    assert top.arm is not None
    assert top.arm.name == "mlp-4.75"
    assert results.best is not None
    assert results.best.matched is None


def test_what_is_kept_says_its_split(results: StudyResults) -> None:
    evidence = evidence_json(results)
    assert json.loads(evidence)["split"] == "test"
    known = known_evidence(evidence.encode(), "evidence.json").floor
    assert known is not None
    assert known.base_loss == pytest.approx(results.baseline.final_loss)
    tree = compact_evidence(results)
    assert tree["split"] == "test"
    assert tree["arms"][2]["final_loss"] == {str(seed): loss for seed, loss in WORSE.items()}
    assert tree["arms"][2]["val_loss"]["1"] == results.arms[2].runs[1].val_loss
    rung = measured(results.folder, "one", (4, 128), 20.0, 10**6)
    assert rung.arms["res-gelu"].losses == WORSE


def test_losses_of_two_splits_are_not_set_against_each_other(results: StudyResults, tmp_path: Path) -> None:
    unsearched = load(write_study(tmp_path / "other", ARMS[:2], search=False))
    assert unsearched.split == "val"
    with pytest.raises(Exception, match="its loss is on the test split here and on the validation split there"):
        against(results, unsearched)
    same = against(results, load(results.folder))
    assert same[2].here == pytest.approx(sum(WORSE.values()) / 3)
    assert {pair.in_words for pair in same} == {"the same loss (3 seeds)"}


def test_a_search_that_is_not_over_says_so(undrawn: None, tmp_path: Path) -> None:
    folder = write_study(tmp_path, ARMS[:3], fates=dict.fromkeys(((n, s) for n in FIXED for s in SEEDS), "missing"))
    tree = json.loads((folder / "study.json").read_text())
    tree["search"] |= {"chosen": {}, "scores": tree["search"]["scores"][:1]}
    (folder / "study.json").write_text(json.dumps(tree))
    text = text_of(write_report(folder))
    assert "It is not over: nothing is chosen yet." in text
    assert "not yet" in text
