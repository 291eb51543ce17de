"""The sections on where training holds: maps over rate and decay, published claims, spikes and attention logits."""

from __future__ import annotations

import math

from qurve.study.drawing import heatmap
from qurve.study.holds import claims_tables, grids, label_of, map_table, rates_table, smoothness_table
from qurve.study.page.pieces import Numbers, in_table, picture
from qurve.study.results import StudyResults
from qurve.study.stability import Cell, Map
from qurve.study.tables import plain, rate


def maps_section(results: StudyResults) -> str | None:
    """A heat map of each architecture that has every rate at every decay, two of each at least."""
    maps = grids(results)
    if not maps:
        return None
    cells = [cell for map_ in maps.values() for cell in map_.cells.values()]
    losses = [loss for cell in cells if (loss := cell.loss) is not None and not cell.diverged]
    scale = (min(losses), max(losses)) if losses else (0.0, 0.0)
    pictures = [_picture(results, map_, f"map-{place}", scale) for place, map_ in enumerate(maps.values(), 1)]
    return "".join(pictures) + in_table("stable-rates", rates_table(maps))


def claims_section(results: StudyResults) -> str | None:
    maps = grids(results)
    names = ("claims", "inferences")
    return "".join(map(in_table, names, claims_tables(results, maps))) if maps else None


def smoothness_section(results: StudyResults) -> str | None:
    table = smoothness_table(results)
    return None if table is None else in_table("smoothness", table)


def _picture(results: StudyResults, map_: Map, name: str, scale: tuple[float, float]) -> str:
    label, table = label_of(results, map_.arm), map_table(results, map_)
    values = [[_value(map_.cells[lr, decay]) for lr in map_.rates] for decay in map_.decays]
    best = map_.best
    marks = [] if best is None else [(map_.decays.index(best.weight_decay), map_.rates.index(best.lr))]
    rows, columns = [rate(decay) for decay in map_.decays], [rate(lr) for lr in map_.rates]
    low, high = (plain(end, 3) for end in scale)
    return picture(
        name,
        lambda width: heatmap(
            values,
            rows,
            columns,
            row_axis="weight decay",
            column_axis="peak learning rate",
            digits=3 if width > 5 else 2,
            scale=scale,
            marks=marks,
            width=width,
        ),
        alt=f"{label}: final loss over peak learning rate and weight decay; the table below has the numbers",
        caption=f"{label}: mean final loss ({results.split_in_words}, nats per token); the darker, the lower, on one "
        f"scale for all maps of this page: from {low}, the lowest loss in any of them, to {high}, the highest. Ringed: "
        "the lowest of this map. Hatched, with a cross: some seed diverged. Empty: not run to an end.",
        numbers=Numbers(table.title, table.head, table.rows),
    )


def _value(cell: Cell) -> float | None:
    if cell.diverged:
        return None
    return math.nan if cell.loss is None else cell.loss
