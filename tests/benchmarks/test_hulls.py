from __future__ import annotations

import argparse
import itertools
from typing import Any

import hulls
import pytest

from qurve import presets
from qurve.analysis.hull import measure_hulls
from qurve.config import apply_settings
from qurve.model.gpt import GPT

SETTINGS = ["model.query=bottleneck", "model.n_layers=2", "model.context=64"]


def options(**changes: Any) -> argparse.Namespace:
    given = {"preset": "smoke", "settings": SETTINGS, "tokens": 700, "parts": 3, "threads": 1, "device": "cpu"}
    return argparse.Namespace(**given | changes)


def test_parts_are_measured_one_by_one_and_count_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hulls, "PASS_TOKENS", 128)
    report = hulls.measure(options())
    assert [part["tokens"] for part in report["parts"]] == [256, 256, 256]  # six passes of two sequences
    assert report["tokens"] == 768
    assert report["cpu_seconds"] == sum(part["cpu_seconds"] for part in report["parts"]) > 0
    assert all(part["seconds"] > 0 and part["peak_bytes"] > 2**20 for part in report["parts"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["256", "512", "768"]
    config = apply_settings(presets.get("smoke"), SETTINGS).model
    together = measure_hulls(GPT(config), itertools.islice(hulls._ids(config.vocab_size, (2, 64)), 6))
    for found, hull in zip(report["layers"], together, strict=True):
        assert (found["rank"], found["tight"]) == (hull.qkv.rank(), hull.bound.tight)
        assert found["bent"] == pytest.approx(hull.bent)


def test_parts_without_a_pass_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hulls, "PASS_TOKENS", 128)
    with pytest.raises(SystemExit, match="2 passes of 128 tokens have no 3 parts"):
        hulls.measure(options(tokens=256))
