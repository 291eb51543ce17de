"""What speaks against a comparison: all that a sceptical reader should know of a study's folder, in sentences."""

from __future__ import annotations

import json
import math
from typing import Any

from qurve.study.axes import Range
from qurve.study.continued import PLACE, in_words
from qurve.study.paired import paired_interval
from qurve.study.power import LEAST_SEEDS
from qurve.study.results import Arm, StudyResults
from qurve.study.searched import Searched
from qurve.study.study_json import updates_of

UNTUNED = (
    "No learning-rate search is recorded: each arm ran at the rate that its configuration gives. An untuned comparison "
    "can say the opposite of a tuned one."
)
CHANGED = "+changes"
"""At the end of a run's commit where the working tree had others than it."""
MOST_STRAYS = 6
"""Run folders that a sentence names."""
ON_ONE_SPLIT = (
    "The search chose on the validation split, and the arms are compared on it as well, where what was chosen looks a "
    "little better than it is. Arms that are evaluated on the test split too are compared on that."
)


def doubts(results: StudyResults) -> list[str]:
    """Everything in the folder that a sceptical reader should know before believing the comparison, in sentences."""
    found = [f"{difference}. The runs are not paired; no verdict." for difference in results.batches.differences]
    for arm in results.arms:
        if arm.unfinished:
            found.append(f"{arm.label}: {'; '.join(f'seed {run.seed} {run.in_words}' for run in arm.unfinished)}.")
    if results.earlier_seeds:
        looks = "; ".join(", ".join(map(str, seeds)) for seeds in results.earlier_seeds)
        found.append(
            f"This study was run before with other seeds ({looks}). Whoever adds or drops seeds after a look at the "
            "result gets intervals that are too narrow."
        )
    for arm in results.arms:
        if seeds := "; ".join(", ".join(map(str, seeds)) for seeds in results.looked_in_pool.get(arm.name, ())):
            found.append(
                f"{arm.label}: an earlier study of the same pool compared it with this baseline with other seeds "
                f"({seeds}), and no look at them was declared: a verdict here is a second look."
            )
    if before := sum(results.compared_before.values()):
        are = "arm was" if before == 1 else "arms were"
        found.append(
            f"{before} other {are} compared with this baseline before, on seeds that this study has too (in its pool, "
            "or in run folders that study.json does not name). What is picked after such a look seems better than it "
            "is: Holm counts them as well."
        )
    if results.strays:
        more = len(results.strays) - MOST_STRAYS
        named = ", ".join(results.strays[:MOST_STRAYS]) + (f" and {more} more" if more > 0 else "")
        found.append(
            f"Its folder holds runs that study.json does not name ({named}): whoever drops seeds or arms after a look "
            "at them keeps what pleases."
        )
    ends = sorted({run.reported[-1][0] for run in results.runs if run.finished})
    if len(ends) > 1:
        found.append(f"The finished runs were last evaluated at different steps: {', '.join(f'{e:,}' for e in ends)}.")
    for steps, stop_at in sorted(
        {(arm.setting("train.steps"), arm.setting("train.stop_at")) for arm in results.arms}, key=str
    ):
        if isinstance(steps, int) and isinstance(stop_at, int) and stop_at < steps:
            found.append(
                f"Runs were stopped at step {stop_at:,} of a schedule of {steps:,}: the rate had not come down."
            )
    made = [part.environment for run in results.runs for part in run.parts]
    for key in (*PLACE, "compiled"):
        values = {json.dumps(environment[key]) for environment in made if key in environment}
        if len(values) > 1:
            found.append(f"The runs differ in {key}: {', '.join(sorted(values))}.")
    if changed := {commit for one in made if str(commit := one.get("commit")).endswith(CHANGED)}:
        found.append(
            f"The code had changes that no commit holds ({', '.join(sorted(map(str, changed)))}): nobody can check out "
            "what the runs were made with."
        )
    found += _continued(results) + _other_data(results)
    found += search_doubts(results)
    if results.split == "val" and results.search is not None and results.search.chosen:
        found.append(ON_ONE_SPLIT)
    return found


def _continued(results: StudyResults) -> list[str]:
    """The runs that were stopped, and continued elsewhere."""
    seeds: dict[str, list[str]] = {}
    for arm in results.arms:
        for run in arm.runs.values():
            for words in in_words(run.parts):
                seeds.setdefault(f"{arm.label}, {words}", []).append(str(run.seed))
    return [f"{words} (seed{'s' * (len(of) > 1)} {', '.join(of)})." for words, of in seeds.items()]


def _other_data(results: StudyResults) -> list[str]:
    found = sorted({run.fingerprint[:16] for run in results.runs if run.fingerprint})
    return [f"The runs were made from different data ({', '.join(found)})."] if len(found) > 1 else []


def search_doubts(results: StudyResults) -> list[str]:
    """What a sceptical reader should know of the search that the arms' settings come from."""
    search = results.search
    if search is None:
        return [UNTUNED]
    found, arms = [], [arm for arm in results.arms if arm.matched is None and not arm.seed_offset]
    found += [f"{arm.label}: {apart}." for arm in arms if (apart := search_apart(results, arm)) is not None]
    for arm in arms:
        if failed := search.failed(arm.name):
            trials = "trial of its search" if failed == 1 else "trials of its search"
            found.append(f"{arm.label}: {failed} {trials} came to no end, so that it was tried at fewer points.")
    if search.flops is not None and not found:
        found.append(f"Each arm's search had the same FLOPs ({search.flops:.3g}), not the same number of points.")
    if search.sampler == "optuna" and len({len(search.points(arm.name)) for arm in arms}) > 1:
        counts = ", ".join(f"{arm.label} {len(search.points(arm.name))}" for arm in arms)
        found.append(f"Optuna tried different numbers of points: {counts}.")
    found += _elsewhere(results, search)
    for arm in arms:
        chosen, points = search.chosen.get(arm.name), search.points(arm.name)
        if chosen is None:
            found.append(f"{arm.label}: the search has chosen no rate for it.")
            continue
        if chosen.point is None:
            found.append(f"{arm.label}: no point of its search was finished with every seed, so it was not trained.")
            continue
        finite = {frozenset(point): loss for point, loss in points.items() if loss is not None}
        if finite and finite.get(frozenset(chosen.point), math.inf) > min(finite.values()):
            found.append(f"{arm.label}: the chosen point is not the one of the lowest loss in its search.")
        for axis, value, low, high in search.edges(arm.name):
            what = "range" if isinstance(search.space.get(axis), Range) else "grid"
            found.append(
                f"{arm.label}: the chosen {'peak rate' if axis == 'train.lr' else axis} {value:g} is at the edge of "
                f"its {what} ({low:g} to {high:g}); a better one may lie outside."
            )
        if search.steps is not None and arm.setting("train.steps") not in (None, search.steps):
            found.append(
                f"{arm.label}: trained for {arm.setting('train.steps'):,} steps, though its rate was searched at "
                f"{search.steps:,}."
            )
        if (lower := _better_elsewhere(results, arm)) is not None:
            found.append(
                f"{arm.label}: at the baseline's best point it ends {lower:.4f} nats per token lower than at the one "
                "that its search chose: the search's seeds misled it."
            )
        for path, wanted in chosen.point:
            used = arm.setting(path)
            if used is not None and not _is_close(used, wanted):
                found.append(
                    f"{arm.label}: trained at {path} = {_short(used)}, though the search chose {_short(wanted)}."
                )
    return found


def search_apart(results: StudyResults, arm: Arm) -> str | None:
    """Why what the search chose for the arm and for the baseline is no fair choice; None where nothing speaks against
    it. An arm at the baseline's point had no choice, and an A/A arm has the baseline's."""
    search, base = results.search, results.baseline
    if search is None or not (search.chosen or arm.finished or base.finished):
        return None  # it is not over
    searched = {*search.seeds, *(score.trial.seed for score in search.scores)}
    if both := searched & {seed + one.seed_offset for seed in results.seeds for one in (base, arm)}:
        return f"seed {min(both)} is one of the search and of the comparison"
    if arm.matched is not None or arm.seed_offset or arm.name == base.name:
        return None
    for one, whose in ((arm, "its search"), (base, "the baseline's search")):
        if one.name not in search.chosen:
            return f"{whose} has chosen no point to train at"
        if not search.tried(one.name):
            return f"nothing is recorded of {whose}, from which its point is said to come"
        if (halved := search.halved_apart(one.name)) is not None:
            return f"{whose} was no whole halving: {halved}"
    if search.flops is not None:
        costs = {one.name: _cost_of_a_step(search, one) for one in (arm, base)}
        return search.flops_apart(costs) if all(costs.values()) else None
    if search.sampler != "optuna" and search.offered(arm.name) != search.offered(base.name):
        ours, theirs = (len(search.offered(one.name)) for one in (arm, base))
        return f"its search was another one than the baseline's ({ours} runs, and {theirs} of the baseline)"
    return None


def _elsewhere(results: StudyResults, search: Searched) -> list[str]:
    """In what the search's trials were other trainings than the comparison's, which all arms have alike."""
    tokens, found = results.baseline.setting("train.tokens_per_step"), list[str]()
    if search.tokens_per_step is not None and tokens not in (None, search.tokens_per_step):
        found.append(
            f"Trained with {tokens:,} tokens a step, though the rates were searched with {search.tokens_per_step:,}."
        )
    there, here = search.data_fingerprint, {run.fingerprint for run in results.runs if run.fingerprint}
    if there is not None and here - {there}:
        found.append("Trained on other data than the rates were searched on.")
    return found


def searched_alike(results: StudyResults) -> bool:
    """Whether every arm was given the same search, as far as its evidence tells."""
    search, own = results.search, [arm for arm in results.arms if arm.matched is None and not arm.seed_offset]
    if search is None or any(search_apart(results, arm) is not None for arm in own):
        return False
    return search.sampler != "optuna" or len({len(search.points(arm.name)) for arm in own}) == 1


def _better_elsewhere(results: StudyResults, arm: Arm) -> float | None:
    """How much lower the arm ends at the baseline's best point than at its own, where that is more than noise."""
    for there in results.matched:
        seeds = [s for s in arm.runs if s in there.runs and arm.runs[s].finished and there.runs[s].finished]
        if there.matched != arm.name or len(seeds) < LEAST_SEEDS:
            continue
        losses = [(there.runs[seed].final_loss, arm.runs[seed].final_loss) for seed in seeds]
        mean, _, high = paired_interval([a - b for a, b in losses if a is not None and b is not None])
        return -mean if high < 0 else None
    return None


def _cost_of_a_step(search: Searched, arm: Arm) -> float:
    """Training FLOPs of one step of a schedule with every seed of the search: less where `train.stop_at` ends it early;
    0 where the configuration does not say."""
    tokens, steps, updates = arm.setting("train.tokens_per_step"), arm.setting("train.steps"), updates_of(arm.config)
    if not isinstance(tokens, int) or not isinstance(steps, int) or updates is None:
        return 0.0
    return arm.flops_per_token * tokens * len(search.seeds) * updates / steps


def _is_close(a: Any, b: Any) -> bool:
    numbers = all(isinstance(value, int | float) for value in (a, b))
    return math.isclose(a, b, rel_tol=1e-9) if numbers else a == b


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
