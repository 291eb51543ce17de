"""A simple checkpoint: the weights in safetensors, the rest in JSON, complete or not there."""

from __future__ import annotations

import json
import os
import shutil

from safetensors.torch import save_file

from qurve.model.gpt import GPT
from qurve.runfolder import FORMAT, RunFolder, write_atomic


def save_checkpoint(run: RunFolder, step: int, model: GPT) -> None:
    """Write `checkpoints/step-…/model.safetensors` and `state.json`; the folder takes its name when it is whole."""
    folder = run.checkpoint(step)
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()},
        part / "model.safetensors",
    )
    write_atomic(
        part / "state.json", json.dumps({"format": FORMAT, "step": step, "config_hash": run.config_json()[1]}) + "\n"
    )
    os.replace(part, folder)
