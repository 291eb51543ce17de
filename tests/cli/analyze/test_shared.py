"""What the commands that look into a trained model share."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console

from qurve.cli.analyze.shared import show, untrained
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
