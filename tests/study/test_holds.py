"""What a report says first of a study of maps: which claims hold at its scale, and how far up it is stable."""

from __future__ import annotations

import dataclasses
import html
import re
from pathlib import Path

import pytest
from fake_study import arm, config, grid, write_study

from qurve.study.doubts import UNTUNED
from qurve.study.headline import headline, reservations
from qurve.study.holds import grids, said_of_maps
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
    """Five published claims are of these two architectures. Read off: the baseline at its own rate is stable at 0.1,
    and not as long as is spoken of at 0.05; the arm at four times the rate is 0.2 above its best, and two points of it
    were never tried."""
    results = study(tmp_path)
    lead, more = said_of_maps(results, grids(results))
    assert lead == (
        "Of 5 published claims of stability 1 holds here, none fails, 1 ends on a plateau, which is neither, and 3 "
        "are not tested."
    )
    assert more == [
        "Hold here: Baseline stable at 1 ×, decay 0.1. Rates are multiples of the baseline's.",
        "End on a plateau: Res-Gelu stable at 4 ×, decay 0.05.",
        "Not tested: Baseline diverging at 1 ×, decay 0.05; Res-Gelu stable at 6.67 ×, decay 0.1; Res-Gelu stable at "
        "5 ×, decay 0.03125 (the sources do not agree).",
        "Largest rate up to which every one tried is stable, over the decays: Baseline 2e-3 to 8e-3; Res-Gelu 2e-3 to "
        "8e-3.",
        "Nothing diverged, up to the largest rate tried, 8e-3.",
        "At 800,000 non-embedding parameters, 400 steps of 2,048 tokens; one seed a point, so each is seen once and "
        "not tested.",
    ]


def test_a_claim_fails_where_a_seed_diverges(tmp_path: Path) -> None:
    results = study(tmp_path, {("res-gelu@0.008-0.05", 2): "diverged"}, (1, 2))
    lead, more = said_of_maps(results, grids(results))
    assert "1 holds here, 1 fails, none ends on a plateau" in lead
    assert "Fail here: Res-Gelu stable at 4 ×, decay 0.05 (1 of 2 seeds diverged, after step 140)." in more
    assert "Points where a seed diverged: Baseline 0 of 4; Res-Gelu 1 of 4." in more
    assert more[-1].endswith("2 seeds a point.")


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
