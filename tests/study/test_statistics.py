from __future__ import annotations

import dataclasses
import math
import random
import statistics
from pathlib import Path

import fake_study
import pytest
from fake_study import BASELINE, NONLINEAR, arm, write_study
from hypothesis import given
from hypothesis import strategies as st

from qurve.errors import BadInput
from qurve.study.doubts import search_doubts
from qurve.study.effects import Unknown, effects
from qurve.study.headline import headline
from qurve.study.paired import holm, paired_p, sign_flip_p
from qurve.study.results import StudyResults, load
from qurve.study.statistics import (
    ROW_KEYS,
    a_a,
    compare,
    comparisons,
    is_alarm,
    level_of,
    overall_verdict,
    relative_gains,
    rows_between,
    summary_rows,
    undeclared_looks,
)

TWO = (BASELINE, arm("new", "New"))
THREE = (BASELINE, arm("a", "A"), arm("b", "B"))
BARELY = (-0.040, -0.02, -0.028)
"""Differences with a p between 2.5 and 5 %."""
losses = st.floats(1.0, 10.0)


def study(folder: Path, new: list[float], base: list[float] | None = None, **more):
    """A study of one arm against the baseline, with these last validation losses per seed."""
    base = base or [3.0] * len(new)
    seeds = tuple(range(1, len(new) + 1))
    finals = {("new", s): loss for s, loss in zip(seeds, new, strict=True)}
    finals |= {("baseline", s): loss for s, loss in zip(seeds, base, strict=True)}
    results = load(write_study(folder, TWO, seeds=seeds, finals=finals, **more))
    return results, compare(results, results.others[0])


# --------------------------------------------------------------------------------------------------------------- gains


def test_gains_of_the_published_losses():
    dll, dppx = relative_gains(2.8736, 2.9441)
    assert dll == pytest.approx(2.395, abs=0.001)
    assert dppx == pytest.approx(6.807, abs=0.001)


@given(losses, losses)
def test_gains_agree_with_their_definitions_and_in_sign(loss, base):
    dll, dppx = relative_gains(loss, base)
    assert dll == pytest.approx(100 * (base - loss) / base)
    assert dppx == pytest.approx(100 * (1 - math.exp(loss - base)), rel=1e-6, abs=1e-9)
    assert (dll > 0) == (dppx > 0) == (loss < base)


# -------------------------------------------------------------------------------------------------------------- verdict


def test_one_seed_has_no_verdict_and_no_interval(tmp_path):
    _, pair = study(tmp_path, [2.5])
    assert pair.verdict == "one seed: no verdict"
    assert (pair.diff, pair.low, pair.high, pair.outcome) == (pytest.approx(-0.5), None, None, "none")


def test_two_seeds_decide_nothing_however_clear(tmp_path):
    _, pair = study(tmp_path, [2.5, 2.5001])
    assert pair.verdict == "two seeds decide nothing"
    assert pair.outcome == "none"


def test_lower_loss_states_size_interval_and_n(tmp_path):
    _, pair = study(tmp_path, [2.99, 2.98, 2.97], [3.0, 3.0, 3.0])
    assert pair.outcome == "noise"  # -0.02 with half width 0.0248: three seeds do not carry it
    _, pair = study(tmp_path / "b", [2.94, 2.93, 2.92], [3.0, 3.0, 3.0])
    assert pair.verdict == (
        "lower loss than the baseline by 0.0700 nats per token (95 % interval 0.0452 to 0.0948, 3 seeds, p = 0.0067)"
    )


def test_higher_loss(tmp_path):
    _, pair = study(tmp_path, [3.06, 3.07, 3.08])
    assert pair.outcome == "higher"
    assert pair.verdict.startswith("higher loss than the baseline by 0.0700 nats per token (95 % interval 0.0452 to")


def test_pairing_by_seed_removes_what_the_seeds_share(tmp_path):
    """Seeds far apart, differences alike: only the paired interval sees the gain."""
    _, pair = study(tmp_path, [2.90, 3.40, 2.61], [2.95, 3.46, 2.66])
    assert pair.outcome == "lower"


def test_an_equal_arm_is_noise(tmp_path):
    _, pair = study(tmp_path, [3.0, 3.0, 3.0])
    assert pair.verdict == "cannot be told apart from the noise (3 seeds)"


def test_gains_come_from_the_mean_losses_of_the_pairs(tmp_path):
    _, pair = study(tmp_path, [2.0, 2.0, 2.0], [4.0, 2.5, 2.5])
    assert pair.dll_percent == pytest.approx(100 * (3 - 2) / 3)
    assert pair.dppx_percent == pytest.approx(100 * (1 - math.exp(-1)))


@pytest.mark.parametrize(
    ("fate", "words"),
    [
        ("diverged", "no verdict: seed 4 diverged"),
        ("running", "no verdict yet: seed 4 running"),
        ("missing", "no verdict yet: seed 4 not run"),
        ("failed", "no verdict yet: seed 4 failed"),
        ("stopped", "no verdict yet: seed 4 stopped"),
    ],
)
@pytest.mark.parametrize("who", ["new", "baseline"])
def test_no_verdict_on_what_is_not_whole(tmp_path, fate, words, who):
    results, pair = study(tmp_path, [2.5, 2.51, 2.52, 2.53], fates={(who, 4): fate})
    assert pair.verdict == words + (" (baseline)" if who == "baseline" else "")
    assert pair.outcome == "none"
    assert pair.n == 3
    assert "size" not in overall_verdict(results)
    assert numbers(results, "new") == set()


def numbers(results: StudyResults, name: str) -> set[str]:
    """What is said of an arm beside the baseline, of all that could be."""
    pair = next(pair for pair in comparisons(results) if pair.arm == name)
    row = next(row for row in summary_rows(results) if row["arm"] == name)
    worth = next(found for found in effects(results) if found.arm == name)
    said = {key for key, value in vars(pair).items() if isinstance(value, float)}
    said |= {key for key in row if key.startswith(("diff", "p", "dll", "dppx")) and row[key] is not None}
    return said | {key for key, value in vars(worth).items() if not isinstance(value, str | tuple | Unknown)}


@pytest.mark.parametrize("refused", ["windows", "steps", "batches", "look", "undeclared", "search", "seeds"])
def test_what_takes_the_verdict_takes_every_number(refused: str, tmp_path: Path) -> None:
    new = arm("new", "New", 0.05)
    if refused == "windows":
        new["config"] = fake_study.config(eval__every=10)
    fates = {("new", 2): "other-batches"} if refused == "batches" else {}
    results = load(write_study(tmp_path, (BASELINE, new), seeds=(1, 2, 3, 4), fates=fates))
    assert {"diff", "low", "p_holm", "dll_percent"} <= numbers(
        load(write_study(tmp_path / "whole", (BASELINE, arm("new", "New", 0.05)), seeds=(1, 2, 3, 4))), "new"
    )
    if refused == "steps":
        run = results.baseline.runs[2]
        results.baseline.runs[2] = dataclasses.replace(run, val=(*run.val, (420, 3.0)))
    if refused == "look":
        results = dataclasses.replace(results, earlier_seeds=((1, 2, 3),))
    if refused == "undeclared":
        results = dataclasses.replace(results, looks=(3, 5))
    if refused in ("search", "seeds"):
        assert results.search is not None
        scores = [s for s in results.search.scores if s.trial.arm != "new" or dict(s.trial.point)["train.lr"] < 3e-3]
        change = {"scores": tuple(scores)} if refused == "search" else {"seeds": (4, 5)}
        results = dataclasses.replace(results, search=dataclasses.replace(results.search, **change))
    assert comparisons(results)[0].verdict.startswith("no verdict: ")
    assert numbers(results, "new") == set()


def test_no_verdict_on_other_batches(tmp_path):
    results, pair = study(tmp_path, [2.5, 2.51, 2.52], fates={("new", 2): "other-batches"})
    assert pair.verdict == "no verdict: seed 2: baseline and new did not see the same batch at step 7"
    assert "lower" not in overall_verdict(results)


def test_a_wholly_diverged_arm_has_no_numbers(tmp_path):
    results, _ = study(tmp_path, [2.5, 2.5, 2.5], fates={("new", s): "diverged" for s in (1, 2, 3)})
    row = summary_rows(results)[1]
    assert [row[key] for key in ("val_loss", "diff", "diff_low", "diff_high", "dll_percent", "dppx_percent")] == [
        None
    ] * 6
    assert row["seeds_n"] == 0
    assert row["verdict"] == "no verdict: seed 1 diverged, seed 2 diverged, seed 3 diverged"


@given(st.lists(st.floats(-0.1, 0.1), min_size=0, max_size=6), st.floats(0, 1), st.integers(0, 4))
def test_a_claim_is_made_only_when_the_corrected_p_allows_it(differences, p, looks):
    from qurve.study.statistics import verdict_on

    outcome, words = verdict_on(differences, p, looks, 3, "than it")
    if len(differences) < 3 or p > 0.05 / max(1, looks):
        assert outcome in ("none", "noise")
        assert not words.startswith(("lower", "higher"))
    else:
        assert outcome == ("lower" if statistics.fmean(differences) < 0 else "higher")
        assert "Holm for 3 arms" in words


# --------------------------------------------------------------------------------------------------------- several arms


def family(folder: Path, **by_arm: tuple[float, ...]) -> StudyResults:
    """A study of `THREE` with these differences to a baseline of 3 nats."""
    finals = {(name, seed): 3.0 + d for name, of in by_arm.items() for seed, d in enumerate(of, 1)}
    seeds = tuple(range(1, len(by_arm["a"]) + 1))
    finals |= {("baseline", seed): 3.0 for seed in seeds}
    return load(write_study(folder, THREE, seeds=seeds, finals=finals))


def test_every_p_is_what_it_says(tmp_path):
    found = {"a": (-0.01, -0.02, -0.03, -0.02), "b": (0.01, -0.02, 0.03, 0.02)}
    pairs = comparisons(family(tmp_path, **found))
    assert [pair.p for pair in pairs] == pytest.approx([paired_p(found["a"]), paired_p(found["b"])])
    assert [pair.p_holm for pair in pairs] == holm([pair.p for pair in pairs])
    assert [pair.p_signflip for pair in pairs] == [sign_flip_p(found["a"]), sign_flip_p(found["b"])]


def test_what_an_arm_alone_would_claim_several_arms_may_not(tmp_path):
    p = paired_p(BARELY)
    assert 0.025 < p < 0.05
    results = family(tmp_path, a=BARELY, b=(0.01, -0.01, 0.002))
    pair = compare(results, results.others[0])
    assert pair.high < 0
    assert pair.outcome == "noise"
    assert pair.verdict == (
        "cannot be told apart from the noise (3 seeds): its own 95 % interval leaves out zero, but "
        f"p = {2 * p:.4f} after Holm for 2 arms"
    )


def test_differences_between_any_arms_are_one_family_and_name_what_they_are_against(tmp_path):
    arms = (BASELINE, *(arm(name, name.title(), gain) for name, gain in (("a", 0.0), ("b", 0.003), ("c", 0.05))))
    results = load(write_study(tmp_path, arms, seeds=(1, 2, 3, 4, 5), fates={("c", 2): "stopped"}))
    base, a, b, c = results.arms
    pairs = [(base, a), (a, b), (b, a), (base, b), (a, c)]
    rows = rows_between(results, pairs)
    alone = [compare(dataclasses.replace(results, baseline=x, arms=(x, y)), y) for x, y in pairs]
    assert [row["p"] for row in rows] == [pair.p for pair in alone]
    assert [row["p_holm"] for row in rows] == holm([pair.p for pair in alone])
    assert rows[1]["diff"] == -rows[2]["diff"]
    assert rows[4]["verdict"] == "no verdict yet: seed 2 stopped"
    clear = load(write_study(tmp_path / "clear", arms, seeds=(1, 2, 3, 4, 5)))
    base, a, b, c = clear.arms
    words = rows_between(clear, [(a, c), (c, b)])
    assert words[0]["verdict"].startswith("lower loss than A by")
    assert words[1]["verdict"].startswith("higher loss than C by")
    assert all("after Holm for 2 differences" in row["verdict"] for row in words)


def test_an_arm_that_breaks_eases_no_others_test(tmp_path):
    finals = {("a", seed): 2.9 + seed / 100 for seed in (1, 2, 3)} | {("baseline", seed): 3.0 for seed in (1, 2, 3)}
    results = load(write_study(tmp_path, THREE, finals=finals, fates={("b", 2): "diverged"}))
    a, b = comparisons(results)
    assert (b.p, b.p_holm, b.p_signflip) == (None, None, None)
    assert a.p_holm == pytest.approx(2 * a.p)


def test_the_baseline_against_itself_is_noise(tmp_path):
    results, _ = study(tmp_path, [2.5, 2.51, 2.52])
    assert compare(results, results.baseline).outcome == "noise"


def test_one_seed_and_a_look_before_the_end_give_no_p(tmp_path):
    for number, (new, fates) in enumerate([([2.5], {}), ([2.5, 2.51, 2.52], {("new", 3): "running"})]):
        _, pair = study(tmp_path / str(number), new, fates=fates)
        assert (pair.p, pair.p_holm, pair.p_signflip, pair.outcome) == (None, None, None, "none")


def test_three_equal_arms_make_false_claims_in_one_study_of_twenty_at_most(tmp_path):
    """Through the whole referee; all arms share the baseline's noise."""
    draw, claims = random.Random(11), 0
    results = family(tmp_path, a=(0.0,) * 5, b=(0.0,) * 5)
    for _ in range(1000):
        redrawn(results, draw)
        claims += any(pair.outcome != "noise" for pair in comparisons(results))
    assert claims / 1000 <= 0.05 + 0.02  # three standard errors


def redrawn(results: StudyResults, draw: random.Random) -> None:
    """Give every run another final loss, all of one distribution."""
    for one in results.arms:
        for seed, run in one.runs.items():
            one.runs[seed] = dataclasses.replace(run, val=((400, draw.gauss(3.0, 0.02)),))


# ------------------------------------------------------------------------------------------------------------------ A/A


def test_a_a_is_noise_but_for_the_nominal_rate(tmp_path):
    draw, alarms = random.Random(7), 0
    results = family(tmp_path, a=(0.0,) * 5, b=(0.0,) * 5)
    results.others[0].config["train"]["seed"] = 99
    for _ in range(2000):
        redrawn(results, draw)
        pair = a_a(results, results.others[0])
        alarms += pair.outcome != "noise"
    assert 0.035 <= alarms / 2000 <= 0.065  # three standard errors
    words = {"noise": "cannot be told apart from the noise (5 seeds), as an A/A arm should be"}
    assert pair.verdict.startswith(words.get(pair.outcome, "a false alarm: "))
    assert is_alarm(pair) == (pair.outcome != "noise")


def test_a_a_needs_no_common_batches_and_nothing_else_may_differ(tmp_path):
    finals = {("new", seed): 2.9 + seed / 1000 for seed in (1, 2, 3)} | {("baseline", seed): 3.0 for seed in (1, 2, 3)}
    results = load(write_study(tmp_path, TWO, finals=finals, fates={("new", 2): "other-batches"}))
    assert compare(results, results.others[0]).outcome == "none"
    pair = a_a(results, results.others[0])
    assert pair.outcome == "lower"
    assert pair.verdict.startswith("a false alarm: lower loss than the baseline by 0.0980")
    results.others[0].config["train"]["lr"] = 1.0
    with pytest.raises(BadInput, match=r"new is no A/A arm: it differs from the baseline in train\.lr"):
        a_a(results, results.others[0])
    with pytest.raises(BadInput, match="it is the baseline itself"):
        a_a(results, results.baseline)


def test_an_a_a_arm_of_a_study_is_judged_alone_and_never_claimed_of(tmp_path):
    twin = arm("a-a", "A/A", seed_offset=1000)
    finals = {("baseline", seed): 3.0 for seed in (1, 2, 3)} | {("new", seed): 2.96 for seed in (1, 2)}
    finals |= {("new", 3): 2.97} | {("a-a", seed): 2.9 + seed / 1000 for seed in (1, 2, 3)}
    with_it, without = (
        load(write_study(tmp_path / str(len(arms)), arms, finals=finals)) for arms in ((*TWO, twin), TWO)
    )
    new, a_a_of_it = comparisons(with_it)
    assert new == comparisons(without)[0]  # the family is what it was
    assert a_a_of_it == a_a(with_it, with_it.arms[2]) == compare(with_it, with_it.arms[2])
    assert a_a_of_it.verdict.startswith("a false alarm: lower loss")
    assert summary_rows(with_it)[2]["verdict"] == a_a_of_it.verdict
    assert with_it.best.name == headline(with_it).arm.name == "new"  # though the other's loss is lower
    assert not any("A/A" in doubt for doubt in search_doubts(with_it))
    assert "arms with one baseline" not in overall_verdict(with_it)
    alone = load(write_study(tmp_path / "alone", (BASELINE, twin), finals=finals))
    assert headline(alone) is None
    assert "A/A" in overall_verdict(alone)


# ---------------------------------------------------------------------------------------------------------------- looks


def looked(folder: Path, new: list[float], *, looks=(), earlier=()):
    results, _ = study(folder, new)
    results = dataclasses.replace(results, looks=looks, earlier_seeds=earlier)
    return results, compare(results, results.others[0])


FIVE = [2.90, 2.91, 2.92, 2.93, 2.94]


def test_declared_looks_share_the_five_per_cent(tmp_path):
    results, pair = looked(tmp_path / "clear", FIVE, looks=(3, 5), earlier=((1, 2, 3),))
    assert level_of(results) == 0.025
    assert pair.outcome == "lower"
    assert "Looks were declared at 3, 5 seeds; each is judged at 2.5 %." in overall_verdict(results)
    barely = [3.0 + difference for difference in BARELY]
    _, pair = looked(tmp_path / "once", barely)
    assert pair.outcome == "lower"
    _, pair = looked(tmp_path / "first of two", barely, looks=(3, 5))
    assert pair.verdict == (
        "cannot be told apart from the noise (3 seeds): its own 95 % interval leaves out zero, but "
        f"p = {pair.p:.4f}, and each of 2 declared looks may spend 0.0250"
    )


def test_a_look_that_was_not_declared_takes_the_verdict(tmp_path):
    _, pair = looked(tmp_path / "a", FIVE[:4], looks=(3, 5))
    assert pair.verdict == "no verdict: a look at 4 seeds was not declared (declared: 3, 5)"
    _, pair = looked(tmp_path / "b", FIVE, earlier=((1, 2, 3),))
    assert pair.verdict == (
        "no verdict: it was run before with other seeds (1, 2, 3), and no look at them was declared"
    )
    assert pair.p is None


@pytest.mark.parametrize(
    ("earlier", "forbidden"),
    [((1, 2), False), ((1, 2, 3), True), ((1, 2, 3, 4), False), ((4, 9), True), ((7, 8, 9), True)],
)
def test_which_looks_could_have_ended_in_a_claim_or_in_a_choice(tmp_path, earlier, forbidden):
    results, _ = looked(tmp_path, FIVE, looks=(4, 5), earlier=(earlier,))
    assert undeclared_looks(results) == ([earlier] if forbidden else [])


def test_a_look_through_the_pool_takes_the_verdict_of_the_arm_that_was_looked_at(tmp_path):
    results = family(tmp_path, a=(-0.3, -0.31, -0.29), b=(-0.3, -0.31, -0.29))
    results = dataclasses.replace(results, looked_in_pool={"a": ((1, 2, 3, 4),)})
    looked_at, other = comparisons(results)
    assert (looked_at.outcome, other.outcome) == ("none", "lower")
    assert "another study of its pool looked at it with other seeds (1, 2, 3, 4), undeclared" in looked_at.verdict
    assert looked_at.p is None


def test_looks_are_read_from_the_studys_file(tmp_path):
    folder = write_study(tmp_path, TWO)
    file = folder / "study.json"
    file.write_text(file.read_text()[:-1] + ', "looks": [2, 3]}')
    assert load(folder).looks == (2, 3)
    file.write_text(file.read_text().replace("[2, 3]", '["3"]'))
    with pytest.raises(BadInput, match=r"'looks' are numbers of seeds, not \['3'\]"):
        load(folder)


# ----------------------------------------------------------------------------------------------------------------- rows


def test_rows_have_exactly_the_promised_keys(tmp_path):
    results = load(write_study(tmp_path))
    rows = summary_rows(results)
    promised = (
        "arm seeds_n non_embedding flops_per_token val_loss split final_loss diff diff_low diff_high p p_holm "
        "p_signflip p_signflip_least dll_percent dppx_percent tokens_per_s verdict"
    )
    assert all(" ".join(row) == promised for row in rows)
    assert tuple(promised.split()) == ROW_KEYS
    assert [row["arm"] for row in rows] == ["baseline", "mlp-4.75", "res-gelu"]
    assert {key for key, value in rows[0].items() if value is None} == {
        "diff",
        "diff_low",
        "diff_high",
        "p",
        "p_holm",
        "p_signflip",
        "p_signflip_least",
        "dll_percent",
        "dppx_percent",
    }
    assert None not in rows[2].values()
    finals = [results.arms[2].runs[s].val_loss for s in (1, 2, 3)]
    assert rows[2]["val_loss"] == rows[2]["final_loss"] == statistics.fmean(finals)
    assert rows[2]["p_signflip_least"] == 0.25
    assert rows[2]["non_embedding"] == NONLINEAR["non_embedding"]
    assert rows[2]["tokens_per_s"] == pytest.approx(2048 / 0.102)  # the middle one of the three


def test_overall_verdict_says_what_it_does_not_cover(tmp_path):
    words = overall_verdict(load(write_study(tmp_path / "three")))
    assert words.startswith("MLP 4.75: ")
    assert "this model size, this data and this training length" in words
    assert "not corrected for comparing 2 arms with one baseline; the verdicts are (Holm, 5 %" in words
    assert "can reach no p below 0.25 with 3 seeds" in words
    assert "would be seen with 80 % power" in words
    words = overall_verdict(load(write_study(tmp_path / "two", (BASELINE, NONLINEAR), search=False)))
    assert "not corrected" not in words
    assert "not tuned by a recorded search" in words
    assert "Losses are on" not in words


@pytest.mark.parametrize("kind", ["mlm", "prefix"])
def test_the_verdict_says_which_tokens_the_loss_is_on(kind, tmp_path):
    arms = [arm(name, name, config=fake_study.config(train__objective={"kind": kind})) for name in ("baseline", "b")]
    words = overall_verdict(load(write_study(tmp_path, tuple(arms))))
    tokens = {"mlm": "masked tokens", "prefix": "tokens after the prefix"}[kind]
    assert f"Losses are on the {tokens} alone." in words
    assert "nothing to compare" in overall_verdict(load(write_study(tmp_path / "one", (fake_study.BASELINE,))))


def test_no_verdict_on_other_evaluation_windows(tmp_path):
    results, _ = study(tmp_path, [3.0, 3.1, 3.2])
    results.others[0].config["eval"] = {"every": 1, "windows": 2}
    pair = compare(results, results.others[0])
    assert pair.outcome == "none"
    assert "evaluated on other windows" in pair.verdict


def test_no_verdict_on_runs_that_ended_at_different_steps(tmp_path):
    results, _ = study(tmp_path, [3.0, 3.1, 3.2])
    run = results.others[0].runs[results.seeds[0]]
    results.others[0].runs[results.seeds[0]] = dataclasses.replace(run, val=(*run.val, (10_000, 3.0)))
    pair = compare(results, results.others[0])
    assert pair.outcome == "none"
    assert "ended at different steps" in pair.verdict


def test_the_ends_that_count_are_those_of_the_split_that_is_reported_on(tmp_path):
    arms = fake_study.searched(BASELINE, arm("new", "New"))
    results = load(write_study(tmp_path, arms, seeds=(1, 2, 3)))
    run = results.baseline.runs[2]
    results.baseline.runs[2] = dataclasses.replace(run, test=(*run.test[:-1], (380, run.test[-1][1])))
    assert "ended at different steps (380, 400)" in compare(results, results.others[0]).verdict


def test_a_huge_loss_has_gains_too():
    dll, dppx = relative_gains(5000.0, 3.0)
    assert dll < -100_000
    assert math.isfinite(dppx)
    assert dppx < -1e300
