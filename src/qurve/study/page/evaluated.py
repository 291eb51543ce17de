"""The section of likelihood tasks: paired accuracies, and for each task the loss against the errors of all runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from qurve.study.drawing import Points, scatter_fit
from qurve.study.evaluated import LossAndError, evaluation_table, load_evaluation, losses_and_errors
from qurve.study.page.pieces import Numbers, in_table, picture
from qurve.study.results import StudyResults
from qurve.study.tables import plain, signed

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def tasks_section(results: StudyResults) -> str | None:
    evaluation = load_evaluation(results)
    if evaluation is None:
        return None
    parts = [in_table("tasks", evaluation_table(results, evaluation))]
    labels = {arm.name: arm.label for arm in results.arms}
    for name, (found, draw) in _figures(results).items():
        correlation = signed(found.rank_correlation, 2)
        runs = [
            [labels[arm], plain(loss, 4), plain(100 * error, 1)]
            for arm, points in found.points.items()
            for loss, error in points
        ]
        parts.append(
            picture(
                name,
                draw,
                alt=f"Errors on {found.task} against the {results.split_in_words} loss, a point for each run",
                caption=f"{found.task}: errors against the {results.split_in_words} loss, a point for each of "
                f"{found.n} runs. Rank correlation over all of them: {correlation}. Runs of one arm differ by their "
                "seeds alone, so they are no independent witnesses of what the loss predicts.",
                numbers=Numbers(f"Loss and errors on {found.task}", ["arm", "loss", "errors, %"], runs),
            )
        )
    return "".join(parts)


def task_figures(results: StudyResults) -> dict[str, Callable[[float], Figure]]:
    """The loss against the errors, for each task that the study was evaluated on: file name -> what draws it."""
    return {name: draw for name, (_, draw) in _figures(results).items()}


def _figures(results: StudyResults) -> dict[str, tuple[LossAndError, Callable[[float], Figure]]]:
    evaluation = load_evaluation(results)
    found = [] if evaluation is None else losses_and_errors(results, evaluation)
    return {f"errors-{re.sub(r'[^A-Za-z0-9]+', '-', one.task)}": (one, _drawing(results, one)) for one in found}


def _drawing(results: StudyResults, found: LossAndError) -> Callable[[float], Figure]:
    labels = {arm.name: arm.label for arm in results.arms}
    groups = [
        Points(labels[arm], [(loss, 100 * error) for loss, error in points]) for arm, points in found.points.items()
    ]
    x_axis, y_axis = f"{results.split_in_words} loss (nats per token)", f"errors on\n{found.task} (%)"
    return lambda width: scatter_fit(groups, x_axis=x_axis, y_axis=y_axis, log_x=False, width=width)
