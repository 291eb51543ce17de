"""What the commands that look into a trained model share."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from qurve.cli.analyze.geometry import geometry
from qurve.cli.analyze.mechanism import mechanism
from qurve.cli.analyze.redundancy import redundancy
from qurve.cli.analyze.shared import name_of, show, untrained
from qurve.cli.analyze.symmetry import symmetry
from qurve.data.loader import TokenData
from qurve.data.order import fixed_eval_windows
from qurve.errors import BadInput
from qurve.runfolder import RunFolder
from qurve.study.worth import Table


def test_the_model_before_training_has_the_loss_that_the_run_measured_then(
    finished: RunFolder, data: TokenData
) -> None:
    split = data.split("val")
    windows = split.windows(fixed_eval_windows(len(split), context=32, count=6), 32)
    model = untrained(finished)
    assert not model.training
    with torch.no_grad():
        loss = model.loss(*map(torch.from_numpy, windows)).item()
    measured = finished.eval_lines()[0]
    assert (measured["step"], measured["loss"]) == (0, pytest.approx(loss, abs=1e-6))


@pytest.mark.parametrize(
    ("step", "name", "is_known"),
    [
        (2, "train.seed", False),
        (2, "model.attention_scale", False),
        (0, "train.seed", True),  # it began anew
        (2, "model.dropout", True),
        (2, "train.lr", True),
    ],
)
def test_a_start_that_the_folder_does_not_tell_is_refused(
    finished: RunFolder, tmp_path: Path, step: int, name: str, is_known: bool
) -> None:
    shutil.copytree(finished.path, tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    run.add_to_environment({"resumed": [{"step": step, "changed": {name: [2, 1]}, "earlier_hash": "0"}]})
    if is_known:
        untrained(run)
    else:
        with pytest.raises(BadInput, match=rf"after step 2 with another {name}: the model that it began with"):
            untrained(run)


@pytest.mark.parametrize("command", [geometry, mechanism, redundancy, symmetry])
def test_a_file_in_the_place_of_the_folder_is_refused_before_any_computing(
    command: Callable[..., int], tmp_path: Path
) -> None:
    (tmp_path / "page.html").touch()
    with pytest.raises(BadInput, match=r"page\.html is a file; give another --out"):
        command(tmp_path / "no run", out=tmp_path / "page.html")


def test_a_seed_of_a_study_is_called_by_its_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, name in (("study/runs/wide/seed-12", "wide/seed-12"), ("runs/mine", "mine")):
        (tmp_path / folder).mkdir(parents=True)
        assert name_of(tmp_path / folder) == name
        monkeypatch.chdir(tmp_path / folder)
        assert name_of(Path()) == name


def test_words_stand_on_the_left_and_numbers_on_the_right() -> None:
    out = io.StringIO()
    rows = [["0", "stays", "1,000", "a sentence that has 2 numbers, or 3"], ["1", "goes", "1", "none"]]
    show(Table("A title", ["block", "becomes", "saved", "why"], rows, ["A note."]), Console(file=out, width=99))
    title, head, *lines, note = out.getvalue().splitlines()
    assert (title.strip(), note) == ("A title", "A note.")
    assert [line.index(word) for line, word in zip(lines, ("stays", "goes"), strict=True)] == [
        head.index("becomes")
    ] * 2
    assert {line.index(word) + len(word) for line, word in zip(lines, ("1,000", "    1"), strict=True)} == {
        head.index("saved") + 5
    }
    assert [line.index(word) for line, word in zip(lines, ("a sentence", "none"), strict=True)] == [
        head.index("why")
    ] * 2
