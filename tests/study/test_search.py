"""The search without a training: what is tried, when it ends, and what is refused, with made-up losses."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from played import CONFIGS, DRAWN, RATES, Loss, best_at, played

from qurve import accounting, presets
from qurve.config import differences
from qurve.errors import BadInput
from qurve.study.axes import Range, beyond
from qurve.study.definition import Arm, Study, load_study
from qurve.study.search import Score, Search, Trial, configured, planned, point_name, trial_config, trial_name, trials
from qurve.study.searched import evidence, read_evidence
from qurve.train.config import RunConfig
from tiny import tiny

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def at_least(search: Search) -> int:
    return sum(sum(runs.values()) for runs in planned(search, CONFIGS).values())


def tried(scores: list[Score], arm: str) -> list[dict[str, Any]]:
    return [dict(point) for point in dict.fromkeys(score.trial.point for score in scores if score.trial.arm == arm)]


def values(scores: list[Score], arm: str, path: str = "train.lr") -> list[Any]:
    return sorted({point[path] for point in tried(scores, arm)})


# ------------------------------------------------------------------------------------------------------ equal budgets

losses_of_arms = st.dictionaries(
    st.tuples(st.sampled_from(list(CONFIGS)), st.integers(0, 30)), st.none() | st.floats(1, 9), max_size=40
)


def invented(table: dict[tuple[str, int], float | None]) -> Loss:
    def loss(trial: Trial) -> float | None:
        place = zlib.crc32(repr((trial.point, trial.seed)).encode()) % 31
        return table.get((trial.arm, place), 5 + place / 100)

    return loss


@settings(max_examples=40)
@given(table=losses_of_arms, extensions=st.integers(0, 3), trials_=st.none() | st.integers(6, 20))
def test_grids_stay_equal_whatever_the_losses_are(
    table: dict[tuple[str, int], float | None], extensions: int, trials_: int | None
) -> None:
    space = {**RATES, "train.weight_decay": (0.0, 0.1)}
    search = Search(space, seeds=(101, 102), extensions=extensions, trials=trials_)
    scores = played(search, invented(table))
    assert tried(scores, "baseline") == tried(scores, "wide")
    assert len(tried(scores, "baseline")) <= (trials_ or sys.maxsize)
    assert len(scores) == 2 * 2 * len(tried(scores, "wide"))
    for axis, given_ in space.items():
        assert len(given_) <= len(values(scores, "wide", axis)) <= len(given_) + 2 * extensions


@settings(max_examples=40)
@given(table=losses_of_arms, n=st.integers(1, 12), draw_seed=st.integers(0, 99))
def test_random_points_are_the_same_for_every_arm_whatever_the_losses_are(
    table: dict[tuple[str, int], float | None], n: int, draw_seed: int
) -> None:
    search = Search(DRAWN, "random", trials=n, draw_seed=draw_seed)
    scores = played(search, invented(table))
    assert tried(scores, "baseline") == tried(scores, "wide")
    assert len(tried(scores, "wide")) == n == at_least(search) / 2
    for point in tried(scores, "wide"):
        assert 1e-4 <= point["train.lr"] <= 1e-1
        assert 0 <= point["train.weight_decay"] <= 0.2


@settings(max_examples=40)
@given(table=losses_of_arms, n=st.integers(1, 20), rungs=st.integers(1, 3))
def test_halving_gives_each_arm_the_same_points_at_first_and_never_compares_unfinished_schedules(
    table: dict[tuple[str, int], float | None], n: int, rungs: int
) -> None:
    search = Search(DRAWN, "halving", trials=n, rungs=rungs)
    scores = played(search, invented(table))
    lengths = [round(90 / 3**rung) for rung in reversed(range(rungs))]
    counts = [n, -(-n // 3), -(-n // 9), -(-n // 27)]
    first = {
        arm: [s.trial.point for s in scores if (s.trial.arm, s.trial.steps) == (arm, lengths[0])] for arm in CONFIGS
    }
    assert first["baseline"] == first["wide"]
    for arm in CONFIGS:
        left: set[Any] = set(first[arm])
        for rung, steps in enumerate(lengths):
            there = {s.trial.point: s.val_loss for s in scores if (s.trial.arm, s.trial.steps) == (arm, steps)}
            assert set(there) == left
            finite = [point for point, loss in there.items() if loss is not None]
            left = set(sorted(finite, key=lambda p: there[p])[: counts[rung + 1]])  # type: ignore[arg-type,return-value]
    for score in scores:  # each is a whole schedule of its own length
        train = trial_config(CONFIGS[score.trial.arm], score.trial).train
        assert train.steps == train.updates == train.last_step == score.trial.steps
    assert len(scores) <= at_least(search)


def test_random_search_draws_evenly_in_the_logarithm() -> None:
    scores = played(Search({"train.lr": Range(1e-4, 1e-1)}, "random", trials=300), lambda trial: 3.0)
    decades = [sum(10.0**-k <= lr < 10.0 ** (1 - k) for lr in values(scores, "wide")) for k in (4, 3, 2)]
    assert all(70 < count < 130 for count in decades)


# ------------------------------------------------------------------------------------------------------------ extension


def test_a_grid_is_extended_for_every_arm_where_one_of_them_is_best_at_an_edge() -> None:
    search = Search(RATES, extensions=1)
    scores = played(search, best_at(baseline=2e-3, wide=9e-3))
    assert values(scores, "baseline") == values(scores, "wide") == [1e-3, 2e-3, 4e-3, 8e-3]
    scores = played(search, best_at(baseline=1e-4, wide=9e-3))
    assert values(scores, "baseline") == values(scores, "wide") == [5e-4, 1e-3, 2e-3, 4e-3, 8e-3]


def test_a_grid_is_extended_as_often_as_it_may_be_and_no_further_than_needed() -> None:
    assert values(played(Search(RATES, extensions=2), best_at(baseline=2e-3, wide=1.0)), "baseline")[-1] == 16e-3
    assert values(played(Search(RATES, extensions=9), best_at(baseline=2e-3, wide=8e-3)), "wide")[-1] == 16e-3
    assert values(played(Search(RATES, extensions=9), best_at(baseline=2e-3, wide=2e-3)), "wide")[-1] == 4e-3


def test_no_extension_beyond_the_budget() -> None:
    assert len(values(played(Search(RATES, trials=3, extensions=9), best_at(baseline=1.0, wide=1.0)), "wide")) == 3
    assert len(values(played(Search(RATES, trials=5, extensions=9), best_at(baseline=1.0, wide=1.0)), "wide")) == 5


def test_an_edge_beyond_which_all_diverged_is_none() -> None:
    loss = best_at(baseline=1.0, wide=1.0)
    scores = played(Search(RATES, extensions=3), lambda t: None if dict(t.point)["train.lr"] > 2e-3 else loss(t))  # type: ignore[operator]
    assert values(scores, "wide") == [1e-3, 2e-3, 4e-3]


@pytest.mark.parametrize(
    ("axis", "tried_", "value", "next_"),
    [
        ("train.lr", (1e-3, 2e-3), 2e-3, 4e-3),
        ("train.lr", (2e-3, 1e-3), 1e-3, 5e-4),
        ("train.lr", (1e-3, 2e-3, 4e-3), 2e-3, None),
        ("train.lr", (1e-3,), 1e-3, None),
        ("train.weight_decay", (0.0, 0.1), 0.0, None),
        ("train.weight_decay", (0.0, 0.1), 0.1, 0.2),
        ("train.min_lr/train.lr", (0.1, 0.4), 0.4, 1.0),
        ("train.min_lr/train.lr", (0.1, 1.0), 1.0, None),
        ("model.qk_norm", (False, True), True, None),
        ("train.schedule", ("cosine", "wsd"), "wsd", None),
    ],
)
def test_the_next_value_is_geometric_and_there_is_none_beyond_a_closed_edge(
    axis: str, tried_: tuple[Any, ...], value: Any, next_: float | None
) -> None:
    assert beyond(axis, tried_, value) == next_


def test_a_value_that_fits_no_configuration_ends_the_axis() -> None:
    with_floor = {arm: configured(config, (("train.min_lr", 6e-4),)) for arm, config in CONFIGS.items()}
    scores = played(Search(RATES, extensions=1), best_at(baseline=1e-5, wide=1e-5), with_floor)
    assert values(scores, "wide") == [1e-3, 2e-3, 4e-3]  # 5e-4 is below the floor
    scores = played(
        Search({"train.beta2": (0.6, 0.9)}, extensions=3),
        lambda t: 3 - dict(t.point)["train.beta2"],  # type: ignore[operator]
    )
    assert values(scores, "wide", "train.beta2") == [0.6, 0.9]  # 1.35 is no decay rate


# -------------------------------------------------------------------------------------------------------------- shares


def test_a_share_follows_the_setting_that_it_is_of() -> None:
    search = Search({"train.lr": (1e-3, 2e-3), "train.min_lr/train.lr": (0.1, 1.0)})
    points = [dict(trial.point) for trial in trials(search, {"baseline": tiny()}, ())]
    assert points == [{"train.lr": lr, "train.min_lr": floor} for lr in (1e-3, 2e-3) for floor in (lr * 0.1, lr * 1.0)]
    assert points[1]["train.min_lr"] == 1e-3
    config = configured(tiny(), tuple(points[2].items()))
    assert (config.train.lr, config.train.min_lr) == (2e-3, 2e-3 * 0.1)


# ------------------------------------------------------------------------------------------------------ budget in FLOPs


def cost(config: RunConfig) -> int:
    return accounting.count(config.model).flops_per_token * config.train.tokens_per_step * config.train.steps


def test_of_a_budget_in_flops_each_arm_gets_the_points_that_it_pays_for() -> None:
    budget = 10 * cost(CONFIGS["baseline"])
    scores = played(Search(DRAWN, "random", flops=budget), lambda trial: 3.0)
    counts = {arm: len(tried(scores, arm)) for arm in CONFIGS}
    assert counts == {arm: budget // cost(config) for arm, config in CONFIGS.items()}
    assert counts["baseline"] == 10 > counts["wide"]
    assert tried(scores, "baseline")[: counts["wide"]] == tried(scores, "wide")


def test_halving_keeps_within_its_flops() -> None:
    def spent(search: Search, arm: str) -> int:
        scores = played(search, lambda trial: 3.0, {arm: CONFIGS[arm]})
        return sum(cost(trial_config(CONFIGS[arm], score.trial)) for score in scores)

    for arm in CONFIGS:
        n = len({t.point for t in trials(Search(DRAWN, "halving", flops=2e10), {arm: CONFIGS[arm]}, ())})
        assert (
            spent(Search(DRAWN, "halving", flops=2e10), arm)
            <= 2e10
            < spent(Search(DRAWN, "halving", trials=n + 1), arm)
        )


# --------------------------------------------------------------------------------------------------------------- trials


def test_a_trial_sees_no_test_split_and_has_its_seed_and_name() -> None:
    config = tiny('eval.splits=["val","test"]', "train.warmup_steps=2")
    trial = Trial("wide", (("train.lr", 0.002), ("train.weight_decay", 0.1)), 2, 7)
    made = trial_config(config, trial)
    assert (made.eval.splits, made.train.seed, made.train.lr) == (("val",), 7, 0.002)
    assert (made.train.steps, made.train.warmup_steps) == (2, 1)
    assert trial_name(trial, config) == "wide@lr=0.002+weight_decay=0.1+steps=2"
    assert trial_name(dataclasses.replace(trial, steps=4), config) == "wide@lr=0.002+weight_decay=0.1"
    Arm(trial_name(trial, config), "", config)  # it can be a folder
    assert point_name({"model.query": "linear", "model.key": "a b"}) == "query=linear+key=a-b"


def test_a_shorter_schedule_is_the_whole_one_in_short() -> None:
    long = tiny("train.steps=1000", "train.warmup_steps=100", "train.horizon=1000", "train.decay_steps=200")
    train = configured(long, (), 100).train
    assert (train.steps, train.warmup_steps, train.horizon, train.decay_steps) == (100, 10, 100, 20)


# ------------------------------------------------------------------------------------------------------------- refusals


WHOLE = ("trials", "extensions", "rungs", "factor", "draw_seed")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"space": {}}, "a search needs a space"),
        ({"space": {"train.lr": ()}}, "train.lr needs values"),
        ({"space": {"train.lr": (1e-3, 1e-3)}}, "each once"),
        ({"space": {"train.min_lr/train.lr": (0.1,)}}, "train.lr must be an axis"),
        ({"space": {**RATES, "train.min_lr": (0.1,), "train.min_lr/train.lr": (0.1,)}}, "and train.min_lr none"),
        ({"space": {**RATES, "train.min_lr/train.lr": ("a",)}}, "are numbers"),
        ({"space": DRAWN}, "a grid needs values, and train.lr has a range"),
        ({"space": RATES, "sampler": "random", "trials": 3}, "draws from at least one Range"),
        ({"space": DRAWN, "sampler": "random"}, "needs a budget: trials or flops"),
        ({"space": RATES, "trials": 3, "flops": 1e9}, "not both"),
        ({"space": RATES, "trials": 0}, "search.trials = 0"),
        ({"space": RATES, "factor": 1}, "search.factor = 1"),
        ({"space": RATES, "seeds": ()}, "search.seeds must be different"),
        ({"space": RATES, "seeds": (1, 1)}, "search.seeds must be different"),
        ({"space": RATES, "sampler": "genetic"}, "search.sampler = 'genetic'"),
        ({"space": RATES, "sampler": "optun", "trials": 3}, "did you mean 'optuna'"),
        ({"space": DRAWN, "sampler": "random", "flops": math.inf}, "search.flops = inf: it is a finite number"),
        ({"space": DRAWN, "sampler": "random", "flops": "1e9"}, "it is a finite number"),
        ({"space": DRAWN, "sampler": "random", "flops": 10**400}, "search.flops = 10*: it is a finite number"),
        ({"space": RATES, "sampler": ["grid"]}, r"search.sampler = \['grid'\]; did you mean 'grid'"),
        ({"space": {"train.lr": (10**400,)}}, "search.space: 10* is no value of train.lr"),
        *(({"space": RATES, name: 2.5}, f"search.{name} = 2.5: it is a whole number") for name in WHOLE),
        *(({"space": RATES, name: "3"}, f"search.{name} = '3': it is a whole number") for name in WHOLE),
        ({"space": RATES, "seeds": (True,)}, "search.seeds are whole numbers"),
        ({"space": RATES, "seeds": 5}, "search.seeds are whole numbers"),
        ({"space": [1]}, "maps settings to their values"),
        ({"space": {"train.lr": "abc"}}, "a tuple of values or a Range"),
        ({"space": {"train.lr": ([1],)}}, "is no value of train.lr"),
        ({"space": {"train.lr": (math.nan,)}}, "is no value of train.lr"),
    ],
)
def test_a_search_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Search(**fields)


@pytest.mark.parametrize(("low", "high", "log"), [(1, 1, True), (2, 1, False), (0, 1, True), (1, math.inf, True)])
def test_a_range_that_cannot_be_is_refused(low: float, high: float, log: bool) -> None:
    with pytest.raises(BadInput, match="range"):
        Range(low, high, log)


@pytest.mark.parametrize(
    ("search", "message"),
    [
        (Search(RATES, trials=2), "pays for 2 points an arm, and its space has 3"),
        (Search(DRAWN, "random", flops=1e3), "pays for 0 points an arm"),
        (Search(DRAWN, "halving", trials=9, rungs=9), "90 steps are too few"),
        (Search({"train.lr": Range(1e-3, 1.0001e-3)}, "random", trials=99), "fewer than 99 different points"),
        (Search(DRAWN, "halving"), "more than 1,000 points"),
    ],
)
def test_a_search_that_does_not_fit_its_budget_is_refused(search: Search, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        trials(search, CONFIGS, ())


def test_halving_refuses_schedules_that_are_cut_short() -> None:
    with pytest.raises(BadInput, match=r"train\.stop_at ends them early"):
        trials(Search(RATES, "halving"), {"a": tiny("train.steps=90", "train.stop_at=9")}, ())


@pytest.mark.parametrize(
    ("search", "message"),
    [
        (Search(RATES, seeds=(2, 101)), "seed 2 is one of the search and of the comparison"),
        (Search({"train.lr": (1e-4,)}), r"arm baseline: .* is above the peak, .* as a share"),
        (Search({"train.steps": (1, 2)}), r"train\.steps cannot be searched"),
        (Search({"train.seed": (1, 2)}), r"train\.seed cannot be searched"),
        (Search({"train.tokens_per_step": (64, 128)}), r"train\.tokens_per_step cannot be searched"),
        (Search({"train.rate": (1, 2)}), r"arm baseline: search\.space: train\.rate: there is no field 'rate'"),
        (Search({"model.query.width": (8, 16)}), r"arm baseline: .* no field 'width'"),
    ],
)
def test_a_study_refuses_a_search_that_is_not_fair_or_fits_no_arm(search: Search, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Study("s", "S", (Arm("baseline", "Baseline", tiny()),), (1, 2), search=search)


def test_a_searched_setting_cannot_be_set_beside_the_search() -> None:
    study = Study("s", "S", (Arm("baseline", "Baseline", tiny()),), search=Search(RATES))
    with pytest.raises(BadInput, match=r"--set train\.lr: study s searches it"):
        study.change(["train.lr=1"])
    assert study.change(["train.weight_decay=0"]).search is study.search


# --------------------------------------------------------------------------------------------------------------- optuna


def test_the_committed_search_is_the_one_that_its_experiment_makes() -> None:
    study, committed = load_study(str(EXPERIMENTS / "small_search.py")), presets.small_search()
    assert isinstance(study.search, Search)
    scores = read_evidence(committed).scores
    assert [score.trial for score in scores] == trials(study.search, study.configs, ())
    again = json.loads(json.dumps(evidence(study.search, study.configs, scores)))
    assert again.pop("space") == {axis: list(values) for axis, values in study.search.space.items()}  # newer than it
    assert again.pop("factor") is None  # newer, too: of a halving
    assert again == {key: committed[key] for key in again}
    for score in scores:
        preset = presets.small(score.trial.arm, *dict(score.trial.point).values())  # type: ignore[arg-type]
        assert differences(preset, trial_config(study.configs[score.trial.arm], score.trial)).keys() <= {"train.seed"}


def test_optuna_tries_as_many_points_for_each_arm_and_goes_on_where_it_was() -> None:
    pytest.importorskip("optuna")
    search = Search({**DRAWN, "train.schedule": ("cosine", "wsd")}, "optuna", trials=12)
    scores = played(search, best_at(baseline=1e-3, wide=1e-2))
    assert len(tried(scores, "baseline")) == len(tried(scores, "wide")) == 12
    assert [s.trial for s in played(search, best_at(baseline=1e-3, wide=1e-2))] == [s.trial for s in scores]
    assert len(trials(search, CONFIGS, scores[:6])) == 2
    assert tried(scores, "baseline") != tried(scores, "wide")


def test_optuna_is_asked_for_by_name_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(BadInput, match=r"pip install 'qurve\[search\]'"):
        trials(Search(DRAWN, "optuna", trials=2), CONFIGS, ())
