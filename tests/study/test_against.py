from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from fake_study import BASELINE, NONLINEAR, THREE_ARMS, arm, config, write_study

from qurve.errors import BadInput
from qurve.runfolder import RunFolder
from qurve.study.against import MEASUREMENT, against
from qurve.study.paired import holm, paired_p
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
    assert pair.changed_in_words["train.lr"] == ("1e-3", "8e-3")
    assert pair.in_words == (
        "lower loss here than there by 0.1000 nats per token "
        "(95 % interval 0.1000 to 0.1000, 3 seeds, p < 0.0001 after Holm for 2 arms)"
    )
    assert pair.outcome == "lower"


def test_two_seeds_decide_nothing(tmp_path):
    pair = against(*two(tmp_path, seeds=(1, 2), finals=FINALS | {("res-gelu", 1): 9.0}))[1]
    assert (pair.seeds, pair.outcome) == ((1, 2), "none")
    assert pair.in_words == "two seeds decide nothing; in one of the two alone: seed 3"


UNFINISHED = {
    "diverged": "no verdict: seed 2 diverged (there)",
    "missing": "no verdict yet: seed 2 not run (there)",
    "running": "no verdict yet: seed 2 running (there)",
    "failed": "no verdict yet: seed 2 failed (there)",
    "stopped": "no verdict yet: seed 2 stopped (there)",
}


@pytest.mark.parametrize(("fate", "said"), UNFINISHED.items())
@pytest.mark.parametrize("place", ["here", "there"])
def test_no_seed_is_dropped_silently(fate, said, place, tmp_path):
    """Whatever became of it, it is named, and what takes a study's verdict away takes this one."""
    finals = {key: loss + 0.1 for key, loss in FINALS.items()}
    for name in ("here", "there"):
        fates = {("res-gelu", 2): fate} if name == place else {}
        chosen = FINALS if name == "here" else finals
        write_study(tmp_path / name, (BASELINE, NONLINEAR), finals=chosen, fates=fates, steps=40)
    pair = against(load(tmp_path / "here"), load(tmp_path / "there"))[1]
    assert pair.seeds == (1, 3)
    assert pair.in_words == said.replace("there", place)
    assert pair.outcome == "none"
    assert (pair.p is None) == ("no verdict" in said)


def changed_study(folder, **fields):
    (folder / "study.json").write_text(json.dumps(json.loads((folder / "study.json").read_text()) | fields))
    return load(folder)


@pytest.mark.parametrize("place", ["here", "there"])
def test_looks_are_those_of_a_study(place, tmp_path):
    studies = dict(zip(("here", "there"), two(tmp_path, finals={k: v + 0.1 for k, v in FINALS.items()}), strict=True))

    def found(**fields):
        return against(*({**studies, place: changed_study(studies[place].folder, **fields)}).values())[1]

    assert found(looks=[4, 8]).in_words == (
        f"no verdict: a look at 3 seeds was not declared (declared: 4, 8) ({place})"
    )
    again = found(looks=[], earlier_seeds=[[1, 2, 3, 4]])
    assert again.in_words.startswith("no verdict: it was run before with other seeds (1, 2, 3, 4)")
    assert (again.p, again.outcome) == (None, "none")
    assert found(looks=[3, 8], earlier_seeds=[]).outcome == "lower"


def many(folder, shift, n):
    arms = tuple(arm(f"arm-{i}", f"Arm {i}") for i in range(n))
    draws = random.Random(f"{folder}")
    finals = {
        (a["name"], seed): 3.0 + draws.gauss(0, 0.01) + shift.get(i, 0.0)
        for i, a in enumerate(arms)
        for seed in (1, 2, 3)
    }
    return load(write_study(folder, arms, finals=finals, steps=20, search=False))


def test_many_arms_are_corrected_for_as_a_studys_are(tmp_path, monkeypatch):
    """Of twenty arms without a difference, one in twenty has an interval of its own that leaves out zero."""
    monkeypatch.chdir(tmp_path)  # the numbers are drawn by the folders' names
    uncorrected = 0
    for draw in range(3):
        here, there = (many(Path(f"{place}-{draw}"), {}, 20) for place in ("here", "there"))
        pairs = against(here, there)
        diffs = [
            [a.runs[s].final_loss - b.runs[s].final_loss for s in (1, 2, 3)]
            for a, b in zip(here.arms, there.arms, strict=True)
        ]
        assert [pair.p for pair in pairs] == pytest.approx([paired_p(found) for found in diffs])
        assert [pair.p_holm for pair in pairs] == pytest.approx(holm([pair.p for pair in pairs]))
        assert all(pair.outcome == "noise" for pair in pairs)
        uncorrected += sum(pair.p < 0.05 for pair in pairs)
    assert uncorrected >= 2
    here, there = (many(Path(f"{place}-planted"), {7: shift}, 8) for place, shift in (("here", 0.0), ("there", 1.0)))
    assert [pair.arm for pair in against(here, there) if pair.outcome == "lower"] == ["arm-7"]


NOT_FINISHED = "no seed is finished in both: " + ", ".join(f"seed {seed} failed (there)" for seed in (1, 2, 3))
UNEQUAL = {
    "other windows": ({"config": config(eval__windows=40)}, {}, "eval.windows is None here and 40 there"),
    "another order": ({"config": config(data__order="paper")}, {}, "data.order is 'epochs' here and 'paper' there"),
    "other batches": ({}, {"fates": {("res-gelu", 2): "other-batches"}}, "seed 2 did not see the same batch at step 7"),
    "no seed": ({}, {"fates": {("res-gelu", s): "failed" for s in (1, 2, 3)}}, NOT_FINISHED),
}


@pytest.mark.parametrize(("changes", "more", "reason"), UNEQUAL.values(), ids=UNEQUAL)
def test_an_unequal_arm_is_refused_with_the_reason_and_the_others_are_not(tmp_path, changes, more, reason):
    same, other = against(*two(tmp_path, (BASELINE, {**NONLINEAR, **changes}), **more))
    assert same.refused is None
    assert other.refused == reason
    assert (other.diff, other.low, other.seeds) == (None, None, ())
    assert other.in_words == f"not compared: {reason}"


@pytest.mark.parametrize("path", ["eval__every", "eval__attention_logits"])
def test_how_often_and_what_else_is_measured_changes_no_last_loss(path, tmp_path):
    here, there = (
        load(write_study(tmp_path / str(value), (BASELINE, arm("new", "New", config=config(**{path: value})))))
        for value in (10, 40)
    )
    (_, other) = against(here, there)
    assert other.refused is None
    assert other.changed == {path.replace("__", "."): (40, 10)}


SCALES = ("data__order", "eval__windows", "model__context", "model__vocab_size", "model__attends", "train__objective")


@pytest.mark.parametrize("path", SCALES)
def test_losses_on_two_scales_are_not_compared(path, tmp_path):
    assert {scale.replace("__", ".") for scale in SCALES} == {
        {"data.": "data.order", "eval.": "eval.windows"}.get(setting, setting) for setting in MEASUREMENT
    }
    values = ({"kind": "mlm"}, {"kind": "prefix"}) if path == "train__objective" else (40, 80)
    here, there = (
        load(write_study(tmp_path / str(value), (BASELINE, arm("new", "New", config=config(**{path: value})))))
        for value in values
    )
    same, other = against(here, there)
    assert same.refused is None
    assert other.refused.startswith(path.replace("__", "."))
    assert (other.diff, other.outcome) == (None, "none")


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
        lines = [line for line in file.read_text().splitlines() if json.loads(line)["step"] <= 380]
        file.write_text("\n".join(lines) + "\n")
        RunFolder(file.parent).set_status("finished", step=380)
    tree = json.loads((there.folder / "study.json").read_text())
    tree["arms"][1]["config"]["train"]["stop_at"] = 380
    (there.folder / "study.json").write_text(json.dumps(tree))
    pair = against(here, load(there.folder))[1]
    assert pair.refused == "they were last evaluated at different steps (400 here and 380 there)"


@pytest.mark.parametrize("key", ["commit", "torch", "cpu", "gpu", "device", "precision", "threads"])
def test_runs_that_were_not_made_alike_are_told_beside_the_verdict(key, tmp_path):
    here, there = two(tmp_path, finals={k: loss + 0.1 for k, loss in FINALS.items()})
    assert not any("made alike" in pair.in_words for pair in against(here, there))
    for study, value in ((here, "a"), (there, "b")):
        for file in study.folder.glob("runs/res-gelu/*/environment.json"):
            file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    same, other = against(load(here.folder), load(there.folder))
    assert "made alike" not in same.in_words
    assert other.outcome == "lower"
    assert other.in_words.endswith(f'; not made alike: {key} "a" here and "b" there')


def test_studies_without_an_arm_in_common_are_refused(tmp_path):
    here = load(write_study(tmp_path / "here", THREE_ARMS, seeds=(1,)))
    there = load(write_study(tmp_path / "there", (arm("small", "Small"),), seeds=(1,)))
    with pytest.raises(BadInput, match="no arm in common"):
        against(here, there)
