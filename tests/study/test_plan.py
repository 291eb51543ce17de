from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from qurve import accounting
from qurve.config import apply_settings, to_dict
from qurve.errors import BadInput
from qurve.study.definition import Arm, Study
from qurve.study.execute import Made
from qurve.study.ladder import Ladder, ladder
from qurve.study.noise import Known, floor_of
from qurve.study.pace import Pace, pace_of
from qurve.study.plan import (
    built_in_knowledge,
    ladder_plan_table,
    load_planned,
    make_plan,
    parse_effect,
    plan_ladder,
    plan_sentences,
    plan_table,
)
from qurve.study.power import minimum_detectable, seeds_needed
from qurve.study.search import Range, Score, Search, trials
from tiny import TINY

WIDE = apply_settings(TINY, ["model.d_ff=96"])
STUDY = Study("tiny", "Tiny", (Arm("baseline", "Baseline", TINY), Arm("wide", "Wide", WIDE)))
LOSSES = {"baseline": {1: 3.0, 2: 3.1, 3: 2.9}, "wide": {1: 3.01, 2: 3.09, 3: 2.91}}
SPEEDS, CONFIGS = {"one": 64.0, "other": 32.0}, {"one": to_dict(TINY), "other": to_dict(WIDE)}
KNOWN = Known("there", floor_of(LOSSES, "baseline"), SPEEDS, to_dict(TINY), "a processor", CONFIGS)
"""Its arms are called otherwise than the study's: a speed is a model's, not a name's."""


@pytest.mark.parametrize(("text", "fraction"), [("0.2%", 0.002), ("1 %", 0.01), ("2.4%", 0.024)])
def test_effects_are_per_cents(text, fraction):
    assert parse_effect(text) == pytest.approx(fraction)


@pytest.mark.parametrize("text", ["0.2", "%", "-1%", "0%", "100%", "nan%", "1%%", "a%", "1% of it"])
def test_other_effects_are_refused(text):
    with pytest.raises(BadInput, match="in per cent of the baseline's loss"):
        parse_effect(text)


def test_cost_is_counted_arm_by_arm():
    plan = make_plan(STUDY, 0.01, KNOWN)
    base, wide = plan["arms"]
    tokens = 3 * TINY.train.steps * TINY.train.tokens_per_step
    assert (base["runs"], base["tokens"], plan["runs"], plan["tokens"]) == (3, tokens, 6, 2 * tokens)
    assert wide["flops"] == tokens * accounting.count(WIDE.model).flops_per_token
    assert (base["hours"], wide["hours"]) == (tokens / 64 / 3600, tokens / 32 / 3600)
    assert plan["hours"] == base["hours"] + wide["hours"]


def test_the_runs_of_a_search_are_counted_too():
    search = Search({"train.lr": (1e-3, 1e-2, 1e-1)}, seeds=(101, 102))
    twin = Arm("a-a", "A/A", TINY, seed_offset=1000)
    searched = dataclasses.replace(STUDY, arms=(*STUDY.arms, twin), search=search)
    plan = make_plan(searched, 0.01, KNOWN)
    step = TINY.train.steps * TINY.train.tokens_per_step
    base, wide = (accounting.count(config.model).flops_per_token for config in (TINY, WIDE))
    assert (plan["search"]["runs"], plan["search"]["tokens"]) == (2 * 3 * 2, 12 * step)  # the A/A arm is not searched
    assert plan["search"]["flops"] == 6 * step * (base + wide)
    assert (plan["matched"]["runs"], plan["matched"]["flops"]) == (3, 3 * step * wide)
    assert plan["runs"] == 12 + 9 + 3
    assert plan["hours"] == pytest.approx(step * (6 / 64 + 6 / 32 + 3 / 64 + 3 / 32 + 3 / 64 + 3 / 32) / 3600)
    assert (plan["tested"], plan["made"]) == (1, None)

    halving = Search({"train.lr": Range(1e-3, 1)}, "halving", trials=4, rungs=2, factor=2)
    plan = make_plan(dataclasses.replace(STUDY, search=halving), 0.01, KNOWN)
    assert (plan["search"]["runs"], plan["search"]["tokens"]) == (2 * (4 + 2), 2 * (4 * step // 2 + 2 * step))


SEARCHES = {
    "grid": (Search({"train.lr": (1e-3, 1e-2)}), "exactly"),
    "extended grid": (Search({"train.lr": (1e-3, 1e-2)}, extensions=2), "at least"),
    "random": (Search({"train.lr": Range(1e-3, 1)}, "random", trials=3, extensions=2), "exactly"),
    "halving": (Search({"train.lr": Range(1e-3, 1)}, "halving", trials=4, rungs=2, factor=2), "at most"),
    "optuna": (Search({"train.lr": Range(1e-3, 1)}, "optuna", trials=3), "at most"),
}


@pytest.mark.parametrize(("search", "bound"), SEARCHES.values(), ids=SEARCHES)
@pytest.mark.parametrize("breaks", [False, True])
def test_a_plan_says_whether_the_search_may_take_more_or_less(search, bound, breaks):
    if search.sampler == "optuna":
        pytest.importorskip("optuna")
    plan = make_plan(dataclasses.replace(STUDY, search=search), 0.01, KNOWN)
    told = " ".join(plan_sentences(plan))
    assert ("extensions" in told, "at most" in told) == (bound == "at least", bound == "at most")
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(plan_table(plan))
    assert (f"the search ({bound})" in console.export_text()) == (bound != "exactly")
    configs, scores = {arm.name: arm.config for arm in STUDY.arms}, []  # the whole search, played
    while wanted := trials(search, configs, scores):
        loss = None if breaks else 3.0
        scores += [Score(trial, None if loss is None else loss - dict(trial.point)["train.lr"], "") for trial in wanted]
    more = len(scores) - plan["search"]["runs"]
    assert {"exactly": more == 0, "at least": more >= 0, "at most": more <= 0}[bound]
    assert more == 0 or bound != "exactly"
    if search is SEARCHES["extended grid"][0]:
        assert more == (0 if breaks else 4)
    if search.sampler == "halving":
        assert more == (-4 if breaks else 0)


def test_what_a_pool_holds_is_taken_off():
    search = Search({"train.lr": (1e-3, 1e-2)})
    plan = make_plan(dataclasses.replace(STUDY, search=search), 0.01, KNOWN, Made(STUDY, 4, {"baseline": 2}))
    assert [arm["made"] for arm in plan["arms"]] == [2, 0]
    assert (plan["search"]["made"], plan["matched"], plan["made"], plan["runs"]) == (4, None, 6, 10)
    left = plan["arms"][0]["hours"] / 3 + plan["arms"][1]["hours"]
    assert plan["hours_left"] == pytest.approx(left)
    assert f"6 of 10 runs are in the pool, 4 are left (about {left:,.2f} hours)." in plan_sentences(plan)


def test_declared_looks_make_each_of_them_stricter():
    plan = make_plan(dataclasses.replace(STUDY, looks=(3, 6)), 0.01, KNOWN)
    spread = KNOWN.floor.differences.value
    assert plan["seeds_needed"] == seeds_needed(0.03, spread, level=0.025)
    assert plan["detectable_percent"] == pytest.approx(100 * minimum_detectable(3, spread, level=0.025) / 3.0)
    assert "Each look (declared at 3, 6 seeds) is judged at 2.5 %." in plan_sentences(plan)


def test_seeds_come_from_the_noise():
    plan = make_plan(STUDY, 0.01, KNOWN)
    spread = KNOWN.floor.differences
    assert plan["effect_nats"] == pytest.approx(0.03)
    needed = [seeds_needed(0.03, sd) for sd in (spread.value, spread.low, spread.high)]
    assert [plan[key] for key in ("seeds_needed", "seeds_needed_low", "seeds_needed_high")] == needed
    assert plan["detectable_percent"] == pytest.approx(100 * minimum_detectable(3, spread.value) / 3.0)
    assert f"you need n = {needed[0]} seeds" in " ".join(plan_sentences(plan))


def test_each_arm_more_is_one_more_to_correct_for():
    third = dataclasses.replace(STUDY, arms=(*STUDY.arms, Arm("third", "Third", apply_settings(TINY, ["train.lr=1"]))))
    plan = make_plan(third, 0.01, KNOWN)
    assert plan["seeds_needed"] == seeds_needed(0.03, KNOWN.floor.differences.value, arms=2)
    assert plan["arms"][2]["hours"] == plan["arms"][0]["hours"]  # it is the same model
    assert "2 arms judged together" in " ".join(plan_sentences(plan))


def test_without_a_noise_figure_it_says_how_to_get_one():
    for known in (None, dataclasses.replace(KNOWN, floor=None)):
        plan = make_plan(STUDY, 0.01, known)
        assert plan["seeds_needed"] is None
        assert "No noise figure is known" in plan_sentences(plan)[-1]
        assert "qurve compare tiny --seeds 3 --out DIR" in plan_sentences(plan)[-1]


def test_what_is_to_be_made_first_is_called_as_it_was_given():
    told = plan_sentences(make_plan(STUDY, 0.01, None, call="my.py --set train.lr=1"))
    assert "qurve compare my.py --set train.lr=1 --seeds 3 --out DIR" in told[-1]


def test_a_configuration_that_is_none_is_named_with_its_place():
    odd = dataclasses.replace(KNOWN, config={"train": {"lr": "x"}})
    with pytest.raises(BadInput, match=r"there: the baseline's configuration is none that is known here: train\.lr"):
        make_plan(STUDY, 0.01, odd)


def test_noise_of_another_size_is_marked_and_its_speed_is_no_speed_of_this():
    other = to_dict(apply_settings(TINY, ["model.n_layers=1", "train.seed=7"]))
    plan = make_plan(STUDY, 0.01, dataclasses.replace(KNOWN, config=other, configs={"one": other}))
    assert plan["other_settings"] == ["model.n_layers 1 there, 2 here"]
    assert all(arm["by_flops"] for arm in plan["arms"])
    assert "the noise is that of other settings (model.n_layers 1 there" in " ".join(plan_sentences(plan)).lower()


def test_a_model_that_was_not_timed_is_estimated_by_its_flops():
    deep = apply_settings(TINY, ["model.n_layers=3"])
    wanted = dataclasses.replace(STUDY, arms=(*STUDY.arms, Arm("deep", "Deep", deep)))
    plan = make_plan(wanted, 0.01, KNOWN)
    costs = [accounting.count(config.model).flops_per_token for config in (TINY, WIDE, deep)]
    rate = (64 * costs[0] + 32 * costs[1]) / 2
    assert [arm["by_flops"] for arm in plan["arms"]] == [False, False, True]
    assert plan["arms"][2]["hours"] == pytest.approx(plan["arms"][2]["tokens"] * costs[2] / rate / 3600)
    assert plan["hours"] == pytest.approx(sum(arm["hours"] for arm in plan["arms"]))
    said = plan_sentences(plan)[0]
    assert said.startswith("An estimate: one run after the other takes about ")
    assert f"by its FLOPs at {rate:.3g} FLOP/s" in said
    assert f"~{plan['arms'][2]['hours']:,.2f}" in shown(plan_table(plan))


@pytest.mark.parametrize("study", [STUDY, dataclasses.replace(STUDY, search=Search({"train.lr": (1e-3, 1e-2)}))])
def test_hours_are_always_there_and_always_an_estimate(study):
    """Of whatever study, with or without one that was timed."""
    pace = Pace((), 1e9, "which somebody said", None, "a machine")
    for known, given in ((KNOWN, None), (None, pace), (dataclasses.replace(KNOWN, speeds={}), pace)):
        plan = make_plan(study, 0.01, known, pace=given)
        assert plan["hours"] > 0
        assert plan_sentences(plan)[0].startswith("An estimate: ")
    assert plan["by_flops"]
    assert "by FLOPs at 1e+09 FLOP/s, which somebody said" in plan_sentences(plan)[0]
    assert make_plan(study, 0.01, None)["hours"] is None


def test_of_an_unknown_kind_or_an_unknown_model_no_speed_is_taken():
    foreign = {"one": {**to_dict(TINY), "model": {"query": {"kind": "of-another-version"}}}}
    for configs in (foreign, {}):
        assert pace_of(dataclasses.replace(KNOWN, configs=configs)) is None


def test_a_ladder_is_the_sum_of_its_rungs():
    arms = {"baseline": lambda config: config, "wide": lambda config: apply_settings(config, ["model.d_ff=96"])}
    found = ladder("l", "L", TINY, ((1, 32), (2, 32)), arms, tokens_per_parameter=0.05, lengths=(0.1,), seeds=(1, 2))
    pace = Pace((), 1e9, "which somebody said", None, "a machine")
    plan = plan_ladder(found, pace)
    assert [rung["rung"] for rung in plan["rungs"]] == [rung.name for rung in found.rungs]
    for row, rung in zip(plan["rungs"], found.rungs, strict=True):
        alone = make_plan(rung.study, 0.01, None, pace=pace)
        assert all(row[key] == alone[key] for key in ("runs", "tokens", "flops", "hours"))
    assert plan["runs"] == 3 * 2 * 2
    for key in ("tokens", "flops", "hours"):
        assert plan[key] == pytest.approx(sum(row[key] for row in plan["rungs"]))
    text = shown(ladder_plan_table(plan))
    assert "An estimate: " in text
    assert all(rung.name in text for rung in found.rungs)


def test_a_file_may_expose_either(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from qurve.study.ladder import load_definition\nLADDER = load_definition('small')\n")
    assert load_planned(str(file)).name == "small"
    assert isinstance(load_planned(str(file)), Ladder)
    assert isinstance(load_planned("small"), Study)
    file.write_text("STUDY = 7\n")
    with pytest.raises(BadInput, match="does not expose a qurve Study"):
        load_planned(str(file))


def shown(table):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def test_two_seeds_are_said_to_decide_nothing():
    plan = make_plan(dataclasses.replace(STUDY, seeds=(1, 2)), 1e-9, KNOWN)
    assert plan["detectable_percent"] is None
    told = " ".join(plan_sentences(plan))
    assert "Its 2 seeds give no verdict" in told
    assert "n = more than 100,000 seeds" in told


def test_the_small_study_is_planned_with_its_own_evidence():
    root = Path(__file__).parents[2]
    known = built_in_knowledge("small")
    assert (root / known.source).read_bytes() == (root / "src" / "qurve" / "small-compare.json").read_bytes()
    assert known.floor.baseline.n >= 3
    assert built_in_knowledge("paper") is None


def test_the_terminal_shows_every_arm_in_80_columns():
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(plan_table(make_plan(STUDY, 0.01, KNOWN)))
    text = console.export_text()
    assert "…" not in text
    assert all(word in text for word in ("Baseline", "Wide", "all"))
