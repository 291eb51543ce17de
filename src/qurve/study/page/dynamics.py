"""The section on what the blocks were like while they trained."""

from __future__ import annotations

from qurve.study.curves import Curve, band
from qurve.study.dynamics import Picture, curves_of, panels, pictures_of
from qurve.study.figures import dynamics_figure
from qurve.study.page.pieces import aside, numbers_of, picture
from qurve.study.results import StudyResults

DASHES = ("Solid", "dashed", "dotted", "dash-dotted")


def dynamics_section(results: StudyResults) -> str | None:
    """A figure for each kind of measure that some run recorded, one panel a block."""
    return "".join(_picture(results, found) for found in pictures_of(results)) or None


def _picture(results: StudyResults, found: Picture) -> str:
    shown = panels(results)
    labels = "; ".join(f"{dash}: {line.label}" for line, dash in zip(found.lines, DASHES, strict=False))
    means: dict[str, Curve] = {}
    for arm in results.arms:
        for line in found.lines:
            for block in shown:
                if mean := band(curves_of(arm.finished, line.measure, block)).mean:
                    means[f"{arm.label}, {line.label}, block {block}"] = mean
    others = aside(results, "in their architectures' colours")
    return picture(
        found.name,
        lambda width: dynamics_figure(found, results, width),
        alt=f"{found.axis} against steps, one panel a block; the table below has the numbers",
        caption=f"{found.says} {labels}. Lines: mean over the finished seeds; thin: what did not finish.{others}",
        numbers=numbers_of(f"{found.axis}, mean over the finished seeds", means, lambda value: f"{value:.4g}"),
    )
