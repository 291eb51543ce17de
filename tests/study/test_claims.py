"""What is said of a claim beside a map, and the evidence of both: on cases whose answers are known beforehand."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from test_stability import START, ending, map_of, written

from qurve.study.claims import CLAIMS, NEAR, PAPER_RATE, PAPER_STEPS, Claim, evidence, judge
from qurve.study.results import load
from qurve.study.stability import WORSE, Map

AT_FIVE = Claim("", "", "res-gelu", 5 * PAPER_RATE, 0.05, "stable", until_step=400)
"""Of five times the rate, and of as many steps as the runs here have."""
STABLE, PLATEAU, BROKEN, NOTHING = 5.0, 5.0 + 2 * WORSE, None, START + 1
SO_FAR = "not tested at its length: {} so far"
SEEN = [
    ("stable", 400, STABLE, "holds here"),
    ("stable", 400, BROKEN, "does not hold here (diverged)"),
    ("stable", 400, PLATEAU, "plateau here"),
    ("stable", 400, NOTHING, "learned nothing here"),
    ("stable", 401, STABLE, SO_FAR.format("stable")),
    ("stable", 401, BROKEN, "does not hold here (diverged)"),
    ("stable", 401, PLATEAU, SO_FAR.format("a plateau")),
    ("stable", 401, NOTHING, SO_FAR.format("learned nothing")),
    ("diverges", 400, STABLE, "not seen here"),
    ("diverges", 400, BROKEN, "seen here"),
    ("diverges", 400, PLATEAU, "plateau here"),
    ("diverges", 400, NOTHING, "learned nothing here"),
    ("diverges", 401, STABLE, SO_FAR.format("stable")),
    ("diverges", 401, BROKEN, "seen here"),
    ("diverges", 401, PLATEAU, SO_FAR.format("a plateau")),
    ("diverges", 401, NOTHING, SO_FAR.format("learned nothing")),
]


@pytest.mark.parametrize(("says", "until", "loss", "verdict"), SEEN)
@pytest.mark.parametrize("standing", ["published", "disputed", "our inference"])
def test_what_is_said_of_a_claim_is_what_runs_can_show(
    standing: Any, says: Any, until: int, loss: float | None, verdict: str
) -> None:
    map_ = map_of(ending(2e-3, 0.05, 5.0), ending(1e-2, 0.05, loss), ending(3e-3, 0.05, 6.0))
    claim = dataclasses.replace(AT_FIVE, says=says, until_step=until, standing=standing)
    judged = judge(claim, map_, base_rate=2e-3)
    assert (judged.verdict, judged.lr, judged.seeds) == (verdict, 1e-2, 1)
    assert judged.steps == (140 if loss is None else 400)
    assert ("diverged, after step 140" in judged.why) == (loss is None)
    assert loss is None or f"one seed finished 400 steps {loss - 5.0:.3f} nats above its best" in judged.why
    assert judged.why.endswith("it speaks of 401 steps") == ("not tested" in judged.verdict)


def test_every_claim_is_of_a_training_longer_than_the_runs_here() -> None:
    """A claim that names no step is one of a whole training: no 400 steps bear it out."""
    for claim in CLAIMS:
        assert claim.until_step == (20_000 if claim.arm == "baseline" and claim.says == "diverges" else PAPER_STEPS)
        map_ = map_of(ending(claim.lr, claim.weight_decay, 5.0, arm=claim.arm))
        assert judge(claim, map_, PAPER_RATE).verdict == "not tested at its length: stable so far"
        whole = map_of(ending(claim.lr, claim.weight_decay, 5.0, arm=claim.arm, step=claim.until_step))
        said = {"stable": "holds here", "diverges": "not seen here"}[claim.says]
        assert judge(claim, whole, PAPER_RATE).verdict == said


def test_one_seed_that_is_shorter_makes_a_point_shorter() -> None:
    seeds = (ending(1e-2, 0.05, 5.0), ending(1e-2, 0.05, 5.1, seed=2, step=300))
    for both in (seeds, seeds[::-1]):
        judged = judge(AT_FIVE, map_of(*both), base_rate=2e-3)
        assert judged.verdict == "not tested at its length: stable so far"
        assert (judged.seeds, judged.steps) == (2, 300)
        assert judged.why.startswith("2 seeds, in the mean, finished 300 steps")


def test_looked_at_is_the_nearest_of_the_near_points() -> None:
    losses = {9.2e-3: 6.0, 9.9e-3: 5.0, 1.08e-2: 6.0}
    map_ = map_of(*(ending(lr, 0.05, loss) for lr, loss in losses.items()), ending(2e-3, 0.05, 5.0))
    judged = judge(AT_FIVE, map_, base_rate=2e-3)
    assert (judged.lr, judged.verdict) == (9.9e-3, "holds here")


def test_a_divergence_later_than_is_spoken_of_is_told_as_such() -> None:
    map_ = map_of(ending(1e-2, 0.05, None))
    for until, late in ((140, True), (141, False)):
        judged = judge(dataclasses.replace(AT_FIVE, says="diverges", until_step=until), map_, base_rate=2e-3)
        assert judged.verdict == "seen here"
        assert judged.why.endswith("later than it speaks of") == late


@pytest.mark.parametrize(
    "map_",
    [
        None,
        map_of(ending(1e-2, 0.1, 5.0)),
        map_of(ending(1e-2 * NEAR * 1.01, 0.05, 5.0)),
        map_of(ending(1e-2, 0.05, None, status="running")),
    ],
    ids=["no such arm", "another decay", "another rate", "not finished"],
)
def test_what_was_not_run_is_not_judged(map_: Map | None) -> None:
    judged = judge(AT_FIVE, map_, base_rate=2e-3)
    assert judged.verdict == "not run"
    assert judge(AT_FIVE, map_of(ending(1e-2 * 1.09, 0.05, 5.0)), base_rate=2e-3).verdict == "holds here"


def test_what_was_published_and_what_we_infer() -> None:
    """The issue's list of points, each with its standing: no source says what happens at those that we infer."""
    told = {(claim.arm, round(claim.multiple, 2), claim.weight_decay): claim for claim in CLAIMS}
    assert len(told) == len(CLAIMS)
    assert [decay for name, _, decay in told if name == "baseline"] == [0.1, 0.05, 2**-5, 0.0]
    assert {
        place: (c.standing, c.says) for place, c in told.items() if (c.standing, c.says) != ("published", "stable")
    } == {
        ("baseline", 1.0, 0.05): ("published", "diverges"),
        ("baseline", 1.0, 2**-5): ("our inference", "diverges"),
        ("baseline", 1.0, 0.0): ("our inference", "diverges"),
        ("res-gelu", 5.0, 0.05): ("our inference", "diverges"),
        ("res-gelu", 5.0, 2**-5): ("disputed", "stable"),
    }
    assert {place[:2] for place in told} >= {
        ("res-gelu", 6.67),
        ("res-gelu", 4.0),
        ("identity", 2.7),
        ("identity", 3.7),
    }
    for claim in CLAIMS:
        assert claim.source.startswith("arXiv")
        assert claim.says_in_words.startswith("inferred" if claim.standing == "our inference" else "said")
        assert ("no statement" in claim.text) == (claim.standing == "our inference")


# ------------------------------------------------------------------------------------------------------------ evidence


def test_the_evidence_of_a_folder(tmp_path: Path) -> None:
    results = load(written(tmp_path))
    tree = json.loads(json.dumps(evidence(results), allow_nan=False))
    assert tree["base_rate"] == 2e-3
    judged = {(c["arm"], c["weight_decay"], c["says"]): c for c in tree["claims"]}
    assert judged["res-gelu", 0.05, "diverges"]["verdict"] == "seen here"
    assert judged["res-gelu", 0.05, "diverges"]["standing"] == "our inference"
    assert judged["baseline", 0.05, "diverges"]["verdict"] == "not tested at its length: stable so far"
    assert [judged["baseline", 0.05, "diverges"][key] for key in ("steps", "until_step")] == [400, 20_000]
    assert judged["identity", 0.1, "stable"]["verdict"] == "not run"
    assert tree["scale"] == "800,000 non-embedding parameters, 400 steps of 2,048 tokens"
    (decay,) = tree["maps"][1]["by_decay"]
    assert (decay["stable_up_to_lr"], decay["stable_to_largest_tried"], decay["stable_beyond_lr"]) == (2e-3, False, [])
    assert (decay["trained_up_to_lr"], decay["trained_to_largest_tried"]) == (2e-3, False)
    assert [cell["state"] for cell in tree["maps"][1]["cells"]] == ["stable", "diverged"]
    assert math.isfinite(decay["sensitivity"])


def test_a_rate_of_zero_is_a_rate() -> None:
    assert judge(AT_FIVE, map_of(ending(0.0, 0.05, 5.0)), base_rate=2e-3).verdict == "not run"
    assert judge(AT_FIVE, map_of(ending(0.0, 0.05, 5.0)), base_rate=0.0).verdict == "holds here"


def test_runs_that_are_damaged_are_not_judged(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "runs" / "baseline@0.002-0.05" / "seed-1" / "metrics.jsonl").write_text("{broken\n")
    assert evidence(load(tmp_path))["claims"][1]["verdict"] == "not run"
