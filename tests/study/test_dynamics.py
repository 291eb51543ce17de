"""What runs recorded of their blocks, read again: curves, panels, and the pictures that there is something for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_study import BASELINE, arm, record, write_study

from qurve.runfolder import RunFolder
from qurve.study.dynamics import MOST_PANELS, PICTURES, curve_of, curves_of, panels, pictures_of
from qurve.study.figures import figures_of
from qurve.study.results import StudyResults, load

ARMS = (BASELINE, arm("new", "New"))


def study(folder: Path, blocks: int = 2, **more: Any) -> StudyResults:
    write_study(folder, ARMS, seeds=(1, 2), search=False, **more)
    for seed in (1, 2):
        norms = [float(seed + block) for block in range(blocks)]
        record(folder, "baseline", seed, {"query.norm": norms})
        record(folder, "new", seed, {"query.norm": norms, "query.f_to_x": [None, *norms[1:]]})
    return load(folder)


def test_curves_are_those_of_the_steps_that_recorded_them(tmp_path: Path) -> None:
    results = study(tmp_path)
    run = results.arms[1].runs[2]
    assert curve_of(run, "query.norm", 1) == [(1, 3.01), (100, 4.0), (200, 5.0), (300, 6.0), (400, 7.0)]
    assert curve_of(run, "query.f_to_x", 0) == []
    assert curve_of(run, "query.norm", 2) == []
    assert curve_of(results.baseline.runs[1], "query.f_to_x", 1) == []
    assert len(curves_of(results.arms[1].finished, "query.f_to_x", 1)) == 2
    assert curves_of(results.baseline.finished, "query.f_to_x", 1) == []


def test_pictures_are_of_what_was_recorded(tmp_path: Path) -> None:
    results = study(tmp_path)
    assert [(found.name, [line.measure for line in found.lines]) for found in pictures_of(results)] == [
        ("dynamics-norms", ["query.norm"]),
        ("dynamics-f", ["query.f_to_x"]),
    ]
    assert {"dynamics-norms", "dynamics-f"} <= figures_of(results).keys()
    nothing = load(write_study(tmp_path / "nothing", ARMS, seeds=(1,), search=False))
    assert pictures_of(nothing) == panels(nothing) == []
    assert not any(name.startswith("dynamics") for name in figures_of(nothing))


def test_what_was_never_a_number_has_no_picture(tmp_path: Path) -> None:
    results = study(tmp_path)
    for seed in (1, 2):
        record(tmp_path, "new", seed, {"query.norm": [1.0, 2.0], "query.cosine": [None, None]})
    results = load(tmp_path)
    assert [found.name for found in pictures_of(results)] == ["dynamics-norms"]
    assert "query.cosine" in results.arms[1].runs[1].dynamics[0][1]


@pytest.mark.parametrize(
    ("blocks", "shown"), [(1, [0]), (6, [0, 1, 2, 3, 4, 5]), (12, [0, 2, 4, 7, 9, 11]), (96, [0, 19, 38, 57, 76, 95])]
)
def test_of_many_blocks_some_are_shown(blocks: int, shown: list[int], tmp_path: Path) -> None:
    assert len(shown) <= MOST_PANELS
    assert panels(study(tmp_path, blocks)) == shown


def test_every_measure_belongs_to_one_picture() -> None:
    measures = [line.measure for picture in PICTURES for line in picture.lines]
    assert len(measures) == len(set(measures))


def test_drawing_shows_a_panel_a_block_and_what_did_not_finish(tmp_path: Path) -> None:
    results = study(tmp_path, 7, fates={("new", 2): "diverged"})
    (picture, _) = pictures_of(results)
    for width, columns in ((8.8, 3), (3.9, 2)):
        fig = figures_of(results)[picture.name](results, width)
        axes = [one for one in fig.axes if one.get_visible()]
        assert [one.get_title(loc="left") for one in axes] == [f"block {block}" for block in panels(results)]
        assert axes[0].get_gridspec().ncols == columns
        mean, thin, new = axes[1].get_lines()
        assert mean.get_ydata().tolist() == [2.5 + 0.01 + 0.0, 3.5, 4.5, 5.5, 6.5]
        assert thin.get_xdata().tolist() == [1, 100]
        assert new.get_ydata()[-1] == 6.0
        assert thin.get_color() == new.get_color() != mean.get_color()


@pytest.mark.parametrize("damaged", [7, [1.0], {"query.norm": 3}, {"query.norm": ["x"]}, {"query.norm": [True]}])
def test_a_run_whose_dynamics_are_damaged_is_called_so(damaged: Any, tmp_path: Path) -> None:
    write_study(tmp_path, ARMS, seeds=(1,), search=False)
    run = RunFolder(tmp_path / "runs" / "new" / "seed-1")
    lines = list(run.metrics())
    lines[-1]["dynamics"] = damaged
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    results = load(tmp_path)
    assert [run.status for run in results.runs] == ["finished", "damaged"]
