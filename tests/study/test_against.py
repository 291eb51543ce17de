from __future__ import annotations

import json

import pytest
from fake_study import BASELINE, NONLINEAR, THREE_ARMS, arm, config, write_study

from qurve.errors import BadInput
from qurve.runfolder import RunFolder
from qurve.study.against import against
from qurve.study.results import load
from qurve.study.statistics import paired_interval

FINALS = {(name, seed): 3.0 + seed / 10 for name in ("baseline", "res-gelu") for seed in (1, 2, 3)}


def two(tmp_path, arms=(BASELINE, NONLINEAR), **there):
    here = load(write_study(tmp_path / "here", (BASELINE, NONLINEAR), finals=FINALS))
    return here, load(write_study(tmp_path / "there", arms, **there))


def test_the_same_arms_are_paired_by_seed(tmp_path):
    gains = (0.01, 0.02, 0.04)
    finals = {key: loss + (gains[key[1] - 1] if key[0] == "res-gelu" else 0) for key, loss in FINALS.items()}
    same, better = against(*two(tmp_path, finals=finals))
    assert (same.diff, same.in_words) == (0.0, "the same loss (3 seeds)")
    assert (better.diff, better.low, better.high) == pytest.approx(paired_interval([-gain for gain in gains]))
    assert better.here == pytest.approx(3.2)
    assert better.there == pytest.approx(3.2 + sum(gains) / 3)
    assert better.seeds == (1, 2, 3)
    assert better.in_words == "cannot be told apart from the noise (3 seeds)"


def test_what_changed_in_an_arm_is_named(tmp_path):
    slower = {**NONLINEAR, "config": config(train__lr=1e-3)}
    finals = {key: loss + 0.1 for key, loss in FINALS.items()}
    pair = against(*two(tmp_path, (BASELINE, slower), finals=finals))[1]
    assert pair.changed["train.lr"] == (1e-3, 8e-3)
    assert "train.seed" not in pair.changed
    assert pair.in_words == "lower loss here (3 seeds)"


def test_two_seeds_decide_nothing(tmp_path):
    pair = against(*two(tmp_path, fates={("res-gelu", 2): "diverged"}))[1]
    assert pair.seeds == (1, 3)
    assert pair.low is None
    assert pair.in_words == "2 seeds: no verdict"


UNEQUAL = {
    "other windows": ({"config": config(eval__every=40)}, {}, "eval.every is 20 here and 40 there"),
    "another order": ({"config": config(data__order="paper")}, {}, "data.order is 'epochs' here and 'paper' there"),
    "other batches": ({}, {"fates": {("res-gelu", 2): "other-batches"}}, "seed 2 did not see the same batch at step 7"),
    "no seed": ({}, {"fates": {("res-gelu", s): "failed" for s in (1, 2, 3)}}, "no seed is finished in both"),
}


@pytest.mark.parametrize(("changes", "more", "reason"), UNEQUAL.values(), ids=UNEQUAL)
def test_an_unequal_arm_is_refused_with_the_reason_and_the_others_are_not(tmp_path, changes, more, reason):
    same, other = against(*two(tmp_path, (BASELINE, {**NONLINEAR, **changes}), **more))
    assert same.refused is None
    assert other.refused == reason
    assert (other.diff, other.low, other.seeds) == (None, None, ())
    assert other.in_words == f"not compared: {reason}"


def test_other_data_are_refused(tmp_path):
    here, there = two(tmp_path)
    for file in there.folder.glob("runs/*/*/config.json"):
        tree = json.loads(file.read_text())
        tree["data"]["fingerprint"] = "e" * 64
        file.write_text(json.dumps(tree))
    with pytest.raises(
        BadInput, match=r"cannot be compared with .*: baseline: the data are others; res-gelu: the data"
    ):
        against(here, there)


def test_runs_that_ended_elsewhere_are_refused(tmp_path):
    here, there = two(tmp_path)
    for file in there.folder.glob("runs/res-gelu/*/metrics.jsonl"):
        lines = [line for line in file.read_text().splitlines() if json.loads(line)["step"] < 400]
        file.write_text("\n".join(lines) + "\n")
        RunFolder(file.parent).set_status("finished", step=380)
    pair = against(here, load(there.folder))[1]
    assert pair.refused == "they were last evaluated at different steps (400 here and 380 there)"


def test_studies_without_an_arm_in_common_are_refused(tmp_path):
    here = load(write_study(tmp_path / "here", THREE_ARMS, seeds=(1,)))
    there = load(write_study(tmp_path / "there", (arm("small", "Small"),), seeds=(1,)))
    with pytest.raises(BadInput, match="no arm in common"):
        against(here, there)
