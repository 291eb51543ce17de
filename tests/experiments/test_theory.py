"""The study of `experiments/theory.py`, and what its evidence gathers."""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_study import BASELINE, arm, record, write_study

from qurve.analysis import conditioning
from qurve.config import to_dict
from qurve.data.loader import TokenData
from qurve.study.definition import load_study
from qurve.study.page.build import page
from qurve.study.results import load
from qurve.train.loop import train
from tiny import tiny

FILE = Path(__file__).parents[2] / "experiments" / "theory.py"
ONE_SKIP = {"kind": "skip", "norms": "none", "attention": True, "mlp": False}


@pytest.fixture(scope="module")
def module() -> dict[str, Any]:
    return runpy.run_path(str(FILE))


def test_every_run_keeps_checkpoints_and_records_dynamics(module: dict[str, Any]) -> None:
    study = load_study(str(FILE))
    assert study == module["STUDY"]
    assert [one.name for one in study.arms] == ["baseline", "mlp-4.75", "res-gelu", "identity", "attention-skip"]
    assert all(one.config.train.keep_every and one.config.train.dynamics_every for one in study.arms)


def test_dynamics_are_means_over_seeds(module: dict[str, Any], tmp_path: Path) -> None:
    write_study(tmp_path, (BASELINE, arm("new", "New")), seeds=(1, 2), search=False)
    for seed in (1, 2):
        record(tmp_path, "new", seed, {"query.f_to_x": [None, 0.5 * seed], "key.norm": [1.0, 2.0]})
    found = module["dynamics"](load(tmp_path))
    assert found["baseline"] == {}
    empty, curve = found["new"]["query.f_to_x"]
    assert empty == []
    assert dict(curve)[100] == 0.75 + 1.0
    assert [step for step, _ in found["new"]["key.norm"][0]] == [1, 100, 200, 300, 400]


def test_logits_growth_leaves_out_what_diverged(module: dict[str, Any], tmp_path: Path) -> None:
    cells = [{"lr": lr, "diverged": 0.0, "max_logit": 3 * lr**2} for lr in (1e-3, 2e-3, 4e-3)]
    cells.append({"lr": 8e-3, "diverged": 1.0, "max_logit": 1e9})
    file = tmp_path / "stability.json"
    file.write_text(json.dumps({"maps": [{"arm": "baseline", "cells": cells}]}))
    found = module["logit_growth"](file)["baseline"]
    assert (found["power"], found["points"]) == (pytest.approx(2.0), 3)


@pytest.mark.slow
def test_trained_models_are_looked_into(
    module: dict[str, Any], data: TokenData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conditioning, "MOST_ROWS", 4 * 32)
    kept = (f"data.path={data.folder}", "train.keep_every=2", "train.dynamics_every=2")
    changes = {
        "baseline": (),
        "res-gelu": ("model.query=bottleneck",),
        "attention-skip": (f"model.residual={json.dumps(ONE_SKIP)}",),
    }
    configs = {name: tiny(*kept, *settings) for name, settings in changes.items()}
    study = tmp_path / "study"
    arms = [{**arm(name, name), "config": to_dict(config)} for name, config in configs.items()]
    write_study(study, tuple(arms), seeds=(1, 2), search=False)
    for name, config in configs.items():
        for seed in (1, 2):
            folder = study / "runs" / name / f"seed-{seed}"
            shutil.rmtree(folder)
            train(dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed)), folder, data)
    options = ["--study", str(study), "--stability", str(FILE.parents[1] / "results" / "stability.json")]
    monkeypatch.setattr(sys, "argv", ["theory.py", *options, "--out", str(tmp_path / "theory.json")])
    module["main"]()
    found = json.loads((tmp_path / "theory.json").read_text())
    assert {name: list(runs) for name, runs in found["runs"].items()} == {name: ["1", "2"] for name in changes}
    one_skip, layer, base = (found["runs"][name]["1"] for name in ("attention-skip", "res-gelu", "baseline"))
    assert {verdict["outcome"] for verdict in one_skip["redundancy"]["verdicts"]} == {"identity"}
    assert one_skip["redundancy"]["exact"]["relative"] < 1e-10
    assert {verdict["outcome"] for verdict in base["redundancy"]["verdicts"]} == {"kept"}
    assert [checkpoint["step"] for checkpoint in layer["geometry"]] == [0, 2, 4]
    assert [one["mechanism"]["degrees"][0]["together"] for one in (base, one_skip)] == pytest.approx([2, 2], abs=0.01)
    assert [other["against"] for other in layer["mechanism"]["attention"]] == ["res-gelu/seed-2", "baseline/seed-1"]
    assert [row["layer"] for row in layer["mechanism"]["probes"]["trained"]["conjunctions"]] == [0, 1]
    assert set(found["dynamics"]) == set(changes)
    assert "why_none" in found["against_gains"]["associations"]["bent"]
    pages = study / "runs" / "res-gelu" / "seed-1" / "analysis"
    names = ["geometry.html", "mechanism.html", "redundancy.html", "symmetry.html"]
    assert sorted(file.name for file in pages.glob("*.html")) == names
    assert all(f"seed-1/analysis/{name}" in page(load(study)) for name in names)  # the report leads there
    said_in_the_guide(found, monkeypatch)


def said_in_the_guide(found: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the guide's generators make of the evidence."""
    monkeypatch.syspath_prepend(FILE.parents[1] / "tools")
    passages = runpy.run_path(str(FILE.parents[1] / "tools" / "passages.py"))
    monkeypatch.setitem(passages["PASSAGES"], "docs/theory.md", {"theory": lambda: passages["theory"].passage(found)})
    text = passages["rewritten"]("docs/theory.md", "before\n<!-- theory -->\nold\n<!-- /theory -->\nafter\n")
    assert re.findall(r"\*\*(\w+)\.?\*\*", text) == ["Redundancy", "Symmetry", "Geometry", "Dynamics", "Mechanism"]
    layer = found["runs"]["res-gelu"]["1"]
    assert "bent %, steps 0 → 4" in text
    geometry = text.partition("**Geometry**")[2].partition("Against the arms' gains")[0]
    shares = [float(share) for row in re.findall(r"\| ([\d.e-]+) → ([\d.e-]+) \|", geometry) for share in row]
    assert len(shares) == 4
    assert min(shares) > 0, "no share is rounded away"
    assert f"| 0 | 31 / 47 / 64 | {layer['geometry'][-1]['layers'][0]['qkv']['rank']} |" in text
    assert "| attention-skip | identity | 2,048 |" in text
    assert "another seed 0." in text
    assert "- bent: " in text
    assert (text.startswith("before\n<!-- theory -->\n"), text.endswith("\n<!-- /theory -->\nafter\n")) == (True, True)
