"""An A/A arm whose difference looks real is the first thing that a report says, whichever rule lets it look so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_study import BASELINE, NONLINEAR, THREE_ARMS, arm, write_study

from qurve.study.doubts import UNTUNED
from qurve.study.headline import Headline, alarms, headline, reservations
from qurve.study.markdown import markdown
from qurve.study.page import pieces
from qurve.study.page.build import page
from qurve.study.results import StudyResults, load
from qurve.study.statistics import comparisons, overall_verdict
from qurve.study.worth import noise_table

TWIN = arm("twin", "Twin", seed_offset=1000)
GAIN = (0.041, 0.042, 0.04)


def study(
    folder: Path, twin: tuple[float, ...], looks: tuple[int, ...] = (), fates: dict[tuple[str, int], str] | None = None
) -> StudyResults:
    """An A/A arm with these differences to the baseline, beside an arm with a gain of 0.04."""
    seeds = tuple(range(1, len(twin) + 1))
    finals = {("baseline", seed): 3.0 for seed in seeds} | {("twin", s): 3.0 + twin[s - 1] for s in seeds}
    finals |= {("res-gelu", seed): 3.0 - GAIN[seed % 3] for seed in seeds}
    write_study(folder, (BASELINE, NONLINEAR, TWIN), seeds=seeds, finals=finals, fates=fates, search=False)
    file = folder / "study.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"looks": list(looks)}))
    return load(folder)


ALARMS = {
    "by its test": ((-0.05, -0.051, -0.052), (), {}, "which this study's own test takes for real"),
    "higher": ((0.05, 0.051, 0.052), (), {}, "which this study's own test takes for real"),
    "by its interval, at a look that may spend less": (
        (-0.04, -0.02, -0.028),
        (3, 8),
        {},
        "whose interval leaves out zero, though no claim is made of it",
    ),
}
QUIET = {
    "a seed broke": ((-0.05, -0.051, -0.052, -0.05), (), {("twin", 4): "diverged"}),
    "noise": ((0.01, -0.01, 0.002), (), {}),
    "two seeds decide nothing": ((-0.05, -0.0501), (), {}),
    "no seed": ((0.1, 0.1, 0.1), (), {("twin", seed): "failed" for seed in (1, 2, 3)}),
}


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "svg", lambda *_, **__: "<svg></svg>")


@pytest.mark.parametrize(("twin", "looks", "fates", "how"), ALARMS.values(), ids=ALARMS)
def test_a_false_alarm_stands_above_the_headline(
    twin: tuple[float, ...],
    looks: tuple[int, ...],
    fates: dict[tuple[str, int], str],
    how: str,
    undrawn: None,
    tmp_path: Path,
) -> None:
    results = study(tmp_path, twin, looks, fates)
    (alarm,) = alarms(results)
    assert alarm.startswith("False alarm: Twin is the baseline's own configuration")
    assert how in alarm
    assert (f"No larger than this one: {NONLINEAR['label']}." in alarm) == (abs(twin[0]) > 0.042)
    top = headline(results)
    assert top is not None
    text, html = markdown(results), page(results)
    assert text.index("False alarm: Twin") < text.index(f"**{top.words.partition(':')[0]}")
    assert html.index('id="alarm"') < html.index('id="verdict"') < html.index('class="lead"')
    assert html.count("False alarm: Twin") == text.count("False alarm: Twin") == 1
    assert ">false alarm</span>" in html
    assert overall_verdict(results).startswith("Twin: ")


@pytest.mark.parametrize(("twin", "looks", "fates"), QUIET.values(), ids=QUIET)
def test_no_alarm_where_there_is_none(
    twin: tuple[float, ...], looks: tuple[int, ...], fates: dict[tuple[str, int], str], undrawn: None, tmp_path: Path
) -> None:
    results = study(tmp_path, twin, looks, fates)
    assert alarms(results) == []
    assert "alarm" not in markdown(results)
    assert 'id="alarm"' not in page(results)
    assert overall_verdict(results).startswith(NONLINEAR["label"])


def test_the_table_of_noise_has_the_a_a_arm_and_pools_it(tmp_path: Path) -> None:
    with_it, wide = study(tmp_path / "one", (0.01, -0.01, 0.002)), study(tmp_path / "two", (0.1, -0.1, 0.2))
    tables = [noise_table(with_it), noise_table(wide)]
    assert all(table is not None for table in tables)
    rows = [{row[0]: row[1:] for row in table.rows} for table in tables if table is not None]
    twin = "Twin, the baseline from other weights: differences"
    assert rows[0][twin] != rows[1][twin]
    assert rows[0]["all differences, pooled"] != rows[1]["all differences, pooled"]
    alone = load(write_study(tmp_path / "three", (BASELINE, TWIN), search=False))
    table = noise_table(alone)
    assert table is not None
    assert [row[0] for row in table.rows] == ["Baseline: its losses", twin]
    assert table.notes[-1].startswith("By this noise, to see 0.2 % takes ")


def test_an_a_a_arm_alone_has_its_verdict_on_the_page(undrawn: None, tmp_path: Path) -> None:
    results = load(write_study(tmp_path, (BASELINE, TWIN), search=False))
    (pair,) = comparisons(results)
    top = page(results).partition("<nav")[0]
    assert pair.verdict.partition(" (")[0].lower() in top.lower()
    assert pair.verdict.partition(" (")[0] in markdown(results)


def test_of_several_arms_without_a_verdict_none_stands_on_top(tmp_path: Path) -> None:
    """However low the lowest of them is: two seeds decide nothing."""
    results = load(write_study(tmp_path, THREE_ARMS, seeds=(1, 2), search=False))
    assert headline(results) == Headline("No verdict on any arm; each says why.", None, None, "")


def test_nothing_but_a_a_arms_needs_no_search(tmp_path: Path) -> None:
    alone = load(write_study(tmp_path / "alone", (BASELINE, TWIN), search=False))
    assert UNTUNED not in reservations(alone)
    assert UNTUNED in reservations(load(write_study(tmp_path / "beside", (BASELINE, NONLINEAR, TWIN), search=False)))


def test_an_arm_that_is_told_to_be_lower_stands_before_a_lower_one_that_is_not(tmp_path: Path) -> None:
    base = {1: 3.00, 2: 3.04, 3: 2.97}
    told = {seed: loss - 0.05 - 1e-4 * seed for seed, loss in base.items()}
    noisy = {seed: loss - nats for (seed, loss), nats in zip(base.items(), (0.5, -0.1, 0.1), strict=True)}
    finals = {
        (name, seed): loss
        for name, losses in (("baseline", base), ("told", told), ("noisy", noisy))
        for seed, loss in losses.items()
    }
    arms = (BASELINE, arm("noisy", "Noisy", non_embedding=1), arm("told", "Told", non_embedding=1))
    results = load(write_study(tmp_path, arms, finals=finals, search=False))
    pairs = {pair.arm: pair for pair in comparisons(results)}
    assert (pairs["noisy"].outcome, pairs["told"].outcome) == ("noise", "lower")
    assert pairs["noisy"].diff < pairs["told"].diff  # type: ignore[operator]
    top = headline(results)
    assert top is not None
    assert top.words.startswith("Told: lower loss")
    assert top.caveat.startswith("The lowest that is told of 2 arms: ")
