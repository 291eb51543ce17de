"""The committed loss trace: a change of the numbers, wanted or not, shows here.

`tests/data/trace.json` holds 20 steps of the `smoke` preset's model and data in float32, eager, on one thread, for two
arms. A change that is meant to alter the numbers records it anew, and its diff is then read with the change:

    python tests/train/test_trace.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from qurve import presets
from qurve.config import apply_settings
from qurve.data.loader import TokenData
from qurve.train.config import RunConfig
from qurve.train.data import open_data
from qurve.train.loop import train

FILE = Path(__file__).parent.parent / "data" / "trace.json"
RELATIVE_TOLERANCE = 1e-5
ARMS = {"baseline": "model.query=linear", "res-gelu": "model.query=bottleneck"}


def traced(arm: str) -> RunConfig:
    settings = ("train.steps=20", "train.tokens_per_step=512", "train.threads=1", "train.device=cpu", "eval.every=10")
    return apply_settings(presets.get("smoke"), (*settings, ARMS[arm]))


def record(arm: str, data: TokenData, out: Path) -> dict[str, object]:
    run = train(traced(arm), out, data)
    return {
        "batch_sha": run.train_lines()[-1]["batch_sha"],
        "loss": [line["loss"] for line in run.train_lines()],
        "grad_norm": [line["grad_norm"] for line in run.train_lines()],
        "val_loss": [line["loss"] for line in run.eval_lines()],
    }


@pytest.mark.parametrize("arm", ARMS)
def test_trace_is_as_committed(arm: str, data: TokenData, tmp_path: Path) -> None:
    trace = json.loads(FILE.read_text(encoding="utf-8"))
    assert trace["format"] == 1
    assert data.fingerprint == trace["fingerprint"], "the embedded corpus is not the one that the trace was made on"
    committed, now = trace["arms"][arm], record(arm, data, tmp_path / "run")
    assert now["batch_sha"] == committed["batch_sha"]
    assert now["loss"] == pytest.approx(committed["loss"], rel=trace["relative_tolerance"])
    assert now["val_loss"] == pytest.approx(committed["val_loss"], rel=trace["relative_tolerance"])
    assert now["grad_norm"] == pytest.approx(committed["grad_norm"], rel=trace["relative_tolerance"])


def record_anew() -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = open_data(presets.get("smoke").data, Path(folder) / "data")
        arms = {arm: record(arm, data, Path(folder) / arm) for arm in ARMS}
        tree = {"format": 1, "relative_tolerance": RELATIVE_TOLERANCE, "fingerprint": data.fingerprint, "arms": arms}
        FILE.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record_anew()
