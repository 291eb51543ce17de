from __future__ import annotations

from pathlib import Path

from qurve.model.gpt import GPT
from qurve.runfolder import RunFolder
from qurve.train.checkpoint import save_checkpoint
from tiny import tiny


def test_what_a_killed_save_left_is_not_in_the_way_nor_in_the_checkpoint(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.create("{}", "hash", {})
    half = run.checkpoints / ".step-00000004.part"
    half.mkdir()
    (half / "half-written").write_bytes(b"torn")
    save_checkpoint(run, 4, GPT(tiny().model))
    assert [folder.name for folder in run.checkpoints.iterdir()] == ["step-00000004"]
    assert sorted(file.name for file in run.checkpoint(4).iterdir()) == ["model.safetensors", "state.json"]
