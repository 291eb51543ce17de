"""What a report says first of a study of maps: which claims hold at its scale, and how far up it is stable."""

from __future__ import annotations

import dataclasses
import html
import re
from pathlib import Path
from typing import get_args

import pytest
from fake_study import arm, config, grid, write_study

from qurve.study.claims import CLAIMS, Verdict
from qurve.study.doubts import UNTUNED
from qurve.study.headline import headline, reservations
from qurve.study.holds import FOUND, grids, has_maps, rates_table, said_of_maps
from qurve.study.markdown import markdown
from qurve.study.page import pieces
from qurve.study.page.build import page
from qurve.study.results import StudyResults, load

ARMS = grid(("baseline", "linear"), ("res-gelu", "bottleneck"))
LOSSES = {
    ("baseline", "0.1"): (3.0, 3.05),
    ("baseline", "0.05"): (3.02, 3.3),
    ("res-gelu", "0.1"): (3.0, 3.05),
    ("res-gelu", "0.05"): (3.1, 3.2),
}
"""Of both rates, 2e-3 and 8e-3."""


def study(folder: Path, fates: dict[tuple[str, int], str] | None = None, seeds: tuple[int, ...] = (1,)) -> StudyResults:
    finals = {
        (f"{name}@{lr}-{decay}", seed): loss
        for (name, decay), losses in LOSSES.items()
        for lr, loss in zip(("0.002", "0.008"), losses, strict=True)
        for seed in seeds
    }
    return load(write_study(folder, ARMS, finals=finals, fates=fates, seeds=seeds, search=False))


def test_claims_rates_and_divergences_are_told(tmp_path: Path) -> None:
    """Five published claims are of these two architectures, and each of a training far longer than 400 steps. Read off:
    the baseline at its own rate is stable, as one claim says and another does not; the arm at four times the rate is
    0.2 above its best, and two points of it were never tried."""
    results = study(tmp_path)
    lead, more = said_of_maps(results, grids(results))
    assert lead == (
        "Of 5 published claims of stability none holds here, none fails, none is neither (a plateau, or nothing "
        "learned), and 5 are not tested at the length claimed."
    )
    assert more == [
        "Not tested, stable so far: Baseline stable at 1 ×, decay 0.1; Baseline diverging at 1 ×, decay 0.05. Rates "
        "are multiples of the baseline's.",
        "Not tested, a plateau or worse so far: Res-Gelu stable at 4 ×, decay 0.05.",
        "Not run: Res-Gelu stable at 6.67 ×, decay 0.1; Res-Gelu stable at 5 ×, decay 0.03125 (the sources do not "
        "agree).",
        "Largest rate up to which every one tried is stable, over the decays: Baseline 2e-3 to 8e-3; Res-Gelu 2e-3 to "
        "8e-3.",
        "Nothing diverged, up to the largest rate tried, 8e-3.",
        "At 800,000 non-embedding parameters, 400 steps of 2,048 tokens; one seed a point, so that each is "
        "seen once, and the bound of 0.1 nats decides on one number.",
    ]


def test_a_claim_fails_where_a_seed_diverges(tmp_path: Path) -> None:
    results = study(tmp_path, {("res-gelu@0.008-0.05", 2): "diverged"}, (1, 2))
    lead, more = said_of_maps(results, grids(results))
    assert "none holds here, 1 fails, none is neither" in lead
    assert more[0] == (
        "Fail here: Res-Gelu stable at 4 ×, decay 0.05 (1 of 2 seeds diverged, after step 140). Rates are multiples of "
        "the baseline's."
    )
    assert (
        "Points where a seed diverged, or finished no lower than it started: Baseline 0 of 4; Res-Gelu 1 of 4." in more
    )
    assert more[-1].endswith("2 seeds a point.")


def test_runs_as_long_as_a_claim_speaks_of_decide_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claims = tuple(dataclasses.replace(claim, until_step=400) for claim in CLAIMS)
    monkeypatch.setattr("qurve.study.claims.CLAIMS", claims)
    results = study(tmp_path)
    lead, more = said_of_maps(results, grids(results))
    assert lead.startswith("Of 5 published claims of stability 1 holds here, 1 fails, 1 is neither (a plateau, or")
    assert lead.endswith("and 2 are not tested at the length claimed.")
    assert [sentence.partition(":")[0] for sentence in more[:4]] == ["Hold here", "Fail here", "Neither", "Not run"]


def test_every_verdict_has_a_place_in_the_headline() -> None:
    assert sorted(verdict for verdicts in FOUND.values() for verdict in verdicts) == sorted(get_args(Verdict))


def test_a_point_that_learned_nothing_is_counted_with_those_that_diverged(tmp_path: Path) -> None:
    finals = {("baseline@0.008-0.1", 1): 30.0}
    results = load(write_study(tmp_path, ARMS, finals=finals, seeds=(1,), search=False))
    _, more = said_of_maps(results, grids(results))
    assert (
        "Points where a seed diverged, or finished no lower than it started: Baseline 1 of 4; Res-Gelu 0 of 4." in more
    )


def test_where_not_even_the_lowest_rate_is_stable_none_is(tmp_path: Path) -> None:
    results = study(tmp_path, {("baseline@0.002-0.1", 1): "diverged"})
    maps = grids(results)
    assert any(
        "over the decays: Baseline none to 2e-3; Res-Gelu" in sentence for sentence in said_of_maps(results, maps)[1]
    )
    rows = {(row[0], row[1]): row[2:4] for row in rates_table(results, maps).rows}
    assert rows["Baseline", "0.1"] == ["none; beyond a gap 8e-3", "none"]
    assert rows["Baseline", "0.05"] == ["2e-3", "8e-3 (the largest tried)"]


@pytest.mark.parametrize("kept", [("0.002-0.1", "0.008-0.1"), ("0.002-0.1", "0.002-0.05"), ("0.002-0.1", "0.008-0.05")])
def test_a_map_has_two_rates_and_two_decays_and_every_point(kept: tuple[str, ...], tmp_path: Path) -> None:
    """What has not, beside an architecture that has, is no map either."""
    points = {f"baseline@{point}" for point in kept}
    whole, part = ARMS[4:], tuple(arm for arm in ARMS[:4] if arm["name"] in points)
    alone = load(write_study(tmp_path / "alone", part, seeds=(1,), search=False))
    assert (has_maps(alone), grids(alone)) == (False, {})
    assert list(grids(load(write_study(tmp_path / "both", (*part, *whole), seeds=(1,), search=False)))) == ["res-gelu"]


def test_names_that_mean_something_else_make_no_map(tmp_path: Path) -> None:
    other = arm("res-gelu@wide", "Wide", config=config(model__d_ff=600))
    results = load(write_study(tmp_path, (*ARMS, other), seeds=(1,), search=False))
    assert has_maps(results)
    assert grids(results) == {}


def test_maps_of_architectures_without_a_claim_say_so(tmp_path: Path) -> None:
    results = load(write_study(tmp_path, grid(("mine", "linear")), seeds=(1,), search=False))
    lead, more = said_of_maps(results, grids(results))
    assert lead == "No published claim is of an architecture that is mapped here."
    assert more[0].startswith("Largest rate")


def test_it_stands_on_top_of_page_and_markdown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "svg", lambda *_, **__: "<svg></svg>")
    results = study(tmp_path)
    top = headline(results)
    assert top is not None
    assert (top.words, list(top.more)) == said_of_maps(results, grids(results))
    html_top = html.unescape(re.sub("<[^>]*>", "", page(results).partition("<nav")[0]))
    text = markdown(results).partition("###")[0]
    for sentence in (top.words, *top.more):
        assert sentence in html_top
        assert sentence in text
    assert "No verdict on any arm" not in html_top + text


def test_rates_that_are_mapped_need_no_search(tmp_path: Path) -> None:
    results = study(tmp_path)
    assert UNTUNED not in reservations(results)
    assert UNTUNED in reservations(dataclasses.replace(results, arms=results.arms[:3]))


def test_an_arm_beside_the_maps_of_others_is_untuned(tmp_path: Path) -> None:
    """Whoever's they are, and whether or not it is beside two rates of its own at one decay."""
    maps = grid(("baseline", "linear"))
    for name, more in (("beside", ("new",)), ("two points", ("new@0.002-0.1", "new@0.008-0.1"))):
        arms = tuple(arm(one, one, config=config(train__lr=1e-3 * place)) for place, one in enumerate(more, 1))
        results = load(write_study(tmp_path / name, (*maps, *arms), seeds=(1,), search=False, every=100))
        assert UNTUNED in reservations(results)
    alone = load(write_study(tmp_path / "alone", maps, seeds=(1,), search=False, every=100))
    assert UNTUNED not in reservations(alone)
    twin = load(write_study(tmp_path / "twin", (maps[0], {**maps[0], "name": "twin", "seed_offset": 9}), search=False))
    assert UNTUNED not in reservations(twin)
