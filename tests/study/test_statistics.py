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

from qurve.study.results import load
from qurve.study.statistics import ROW_KEYS, compare, overall_verdict, paired_interval, relative_gains, summary_rows

TWO = (BASELINE, arm("new", "New"))
losses = st.floats(1.0, 10.0)


def study(folder: Path, new: list[float], base: list[float] | None = None, **more):
    """A study of one arm against the baseline, with these last validation losses per seed."""
    base = base or [3.0] * len(new)
    seeds = tuple(range(1, len(new) + 1))
    finals = {("new", s): loss for s, loss in zip(seeds, new, strict=True)}
    finals |= {("baseline", s): loss for s, loss in zip(seeds, base, strict=True)}
    results = load(write_study(folder, TWO, seeds=seeds, finals=finals, **more))
    return results, compare(results, results.others[0])


# ------------------------------------------------------------------------------------------------------------ interval


def test_interval_known_by_hand():
    # mean -0.02, deviation 0.01, three values: half width = 4.302653 * 0.01 / sqrt(3)
    mean, low, high = paired_interval([-0.01, -0.02, -0.03])
    assert mean == pytest.approx(-0.02)
    assert low == pytest.approx(-0.02 - 0.0248414, abs=1e-7)
    assert high == pytest.approx(-0.02 + 0.0248414, abs=1e-7)


def test_interval_of_two_uses_one_degree_of_freedom():
    # the deviation of {0, 0.02} is 0.0141421, its standard error 0.01, and the t quantile 12.706205
    mean, low, high = paired_interval([0.0, 0.02])
    assert (low, high) == (pytest.approx(0.01 - 0.12706205, abs=1e-7), pytest.approx(0.01 + 0.12706205, abs=1e-7))
    assert mean == pytest.approx(0.01)


def test_interval_needs_two():
    with pytest.raises(ValueError, match="at least two"):
        paired_interval([0.1])


@pytest.mark.parametrize("n", [3, 5])
def test_interval_covers_the_truth_as_often_as_it_says(n):
    draw = random.Random(17)
    covered = 0
    for _ in range(2000):
        _, low, high = paired_interval([draw.gauss(-0.02, 0.05) for _ in range(n)])
        covered += low <= -0.02 <= high
    assert 0.93 <= covered / 2000 <= 0.97


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=9), st.floats(-1, 1))
def test_interval_moves_with_its_data_and_mirrors(differences, shift):
    mean, low, high = paired_interval(differences)
    assert low <= mean <= high
    moved = paired_interval([d + shift for d in differences])
    assert moved == pytest.approx((mean + shift, low + shift, high + shift), abs=1e-9)
    mirrored = paired_interval([-d for d in differences])
    assert mirrored == pytest.approx((-mean, -high, -low), abs=1e-12)


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
        "lower loss than the baseline by 0.0700 nats per token (95 % interval 0.0452 to 0.0948, 3 seeds)"
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


def test_gains_come_from_the_mean_losses_of_the_pairs_alone(tmp_path):
    _, pair = study(tmp_path, [2.0, 2.0, 2.0, 9.9], [4.0, 2.5, 2.5, 3.0], fates={("new", 4): "failed"})
    assert pair.seeds == (1, 2, 3)
    assert pair.dll_percent == pytest.approx(100 * (3 - 2) / 3)
    assert pair.dppx_percent == pytest.approx(100 * (1 - math.exp(-1)))
    assert pair.verdict.endswith("; left out: seed 4 failed")


@pytest.mark.parametrize(
    ("fate", "words"),
    [
        ("diverged", "no verdict: seed 4 diverged"),
        ("running", "no verdict yet: seed 4 running"),
        ("missing", "no verdict yet: seed 4 not run"),
    ],
)
@pytest.mark.parametrize("who", ["new", "baseline"])
def test_no_verdict_on_what_is_not_whole(tmp_path, fate, words, who):
    results, pair = study(tmp_path, [2.5, 2.51, 2.52, 2.53], fates={(who, 4): fate})
    assert pair.verdict == words + (" (baseline)" if who == "baseline" else "")
    assert pair.outcome == "none"
    assert pair.n == 3
    assert "size" not in overall_verdict(results)


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


@given(st.lists(st.floats(-0.1, 0.1), min_size=0, max_size=6))
def test_a_claim_is_made_only_when_the_interval_leaves_out_zero(differences):
    from qurve.study.statistics import _words

    outcome, words = _words(differences)
    if len(differences) < 3:
        assert outcome == "none"
        assert "lower" not in words
        assert "higher" not in words
    else:
        _, low, high = paired_interval(differences)
        assert outcome == ("lower" if high < 0 else "higher" if low > 0 else "noise")


# ----------------------------------------------------------------------------------------------------------------- rows


def test_rows_have_exactly_the_promised_keys(tmp_path):
    results = load(write_study(tmp_path))
    rows = summary_rows(results)
    promised = (
        "arm seeds_n non_embedding flops_per_token val_loss diff diff_low diff_high dll_percent dppx_percent "
        "tokens_per_s verdict"
    )
    assert all(" ".join(row) == promised for row in rows)
    assert tuple(promised.split()) == ROW_KEYS
    assert [row["arm"] for row in rows] == ["baseline", "mlp-4.75", "res-gelu"]
    assert {key for key, value in rows[0].items() if value is None} == {
        "diff",
        "diff_low",
        "diff_high",
        "dll_percent",
        "dppx_percent",
    }
    assert None not in rows[2].values()
    finals = [results.arms[2].runs[s].val_loss for s in (1, 2, 3)]
    assert rows[2]["val_loss"] == statistics.fmean(finals)
    assert rows[2]["non_embedding"] == NONLINEAR["non_embedding"]
    assert rows[2]["tokens_per_s"] == pytest.approx(2048 / 0.102)  # the middle one of the three


def test_overall_verdict_says_what_it_does_not_cover(tmp_path):
    words = overall_verdict(load(write_study(tmp_path / "three")))
    assert words.startswith("MLP 4.75: ")
    assert "this model size, this data and this training length" in words
    assert "not corrected for comparing 2 arms" in words
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


def test_a_huge_loss_has_gains_too():
    dll, dppx = relative_gains(5000.0, 3.0)
    assert dll < -100_000
    assert math.isfinite(dppx)
    assert dppx < -1e300
