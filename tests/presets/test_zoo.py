"""The zoo: every kind is in it, every larger arm has its control, and its page says what its evidence says."""

from __future__ import annotations

import copy
import dataclasses
import re
import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

from qurve import accounting, presets
from qurve.config import Choice, differences, from_json, to_dict, to_json
from qurve.errors import QurveError
from qurve.model.gpt import GPT
from qurve.model.mixers import MixerConfig
from qurve.model.residual import ResidualConfig
from qurve.presets import zoo
from qurve.projections import ProjectionConfig
from qurve.study.definition import load_study
from qurve.train.config import RunConfig

TOOL = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "zoo.py"))
BASELINE = presets.get("zoo/baseline")
ARMS = {arm.name: arm for arm in zoo.arms(BASELINE.model)}
SIZES = {name: accounting.count(arm.model).non_embedding for name, arm in ARMS.items()}


def kinds_in(config: Any) -> set[type[Any]]:
    """Of everything that stands in a configuration, as deep as it goes."""
    inner = [getattr(config, field.name) for field in dataclasses.fields(config)]
    inner = [part for value in inner for part in (value if isinstance(value, tuple) else (value,))]
    here = {type(config)} if isinstance(config, Choice) else set()
    return here.union(*(kinds_in(part) for part in inner if dataclasses.is_dataclass(part)))


@pytest.mark.parametrize("base", [ProjectionConfig, MixerConfig, ResidualConfig], ids=lambda base: base.__name__)
def test_every_kind_of_the_package_has_an_arm(base: Any) -> None:
    shown = set().union(*(kinds_in(arm.model) for arm in ARMS.values()))
    ours = {kind for kind in base.registry.values() if kind.__module__.startswith("qurve.")}
    assert sorted(kind.kind for kind in ours - shown) == [], "add an entry to qurve.presets.zoo"


def test_the_study_has_one_seed_and_nothing_but_the_model_differs() -> None:
    study = load_study("zoo")
    assert (study.baseline, study.seeds, study.search) == ("baseline", (1,), None)
    assert [arm.name for arm in study.arms] == list(ARMS)
    assert len({arm.label for arm in study.arms}) == len(study.arms)
    for arm in study.arms:
        assert arm.config == presets.get(f"zoo/{arm.name}") == dataclasses.replace(BASELINE, model=arm.config.model)
    assert differences(BASELINE, presets.get("small/baseline")) == {"train.steps": (240, 480)}


def test_arms_differ_from_each_other_and_say_what_they_are() -> None:
    assert len({str(to_dict(arm.model)) for arm in ARMS.values()}) == len(ARMS)
    for arm in ARMS.values():
        assert re.fullmatch(r"[^|]+\.", arm.sentence)


@pytest.mark.parametrize("name", [name for name in ARMS if name != "baseline"])
def test_a_larger_arm_has_a_control(name: str) -> None:
    widened = {size for other, size in SIZES.items() if ARMS[other].match is not None}
    if SIZES[name] > 1.005 * SIZES["baseline"]:
        assert min(abs(size / SIZES[name] - 1) for size in widened) < 0.005, "add it to CONTROLLED"


def test_controls_are_solved_for() -> None:
    assert {name.removesuffix("-mlp") for name in ARMS if name.endswith("-mlp")} == set(zoo.CONTROLLED)
    for name in zoo.CONTROLLED:
        match = ARMS[f"{name}-mlp"].match
        assert match is not None
        assert (match.wanted, match.achieved) == (SIZES[name], SIZES[f"{name}-mlp"])
        assert SIZES[f"{name}-mlp"] == pytest.approx(SIZES[name], rel=0.001)


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_can_be_built_and_written_down(name: str) -> None:
    config = presets.get(f"zoo/{name}")
    assert from_json(RunConfig, to_json(config)) == config
    with torch.device("meta"):
        model = GPT(ARMS[name].model)
    assert sum(p.numel() for p in model.parameters()) == accounting.count(ARMS[name].model).total


# ------------------------------------------------------------------------------------------------------------- the page


@pytest.fixture(scope="module")
def evidence() -> dict[str, Any]:
    """As `qurve compare zoo` leaves it, with invented numbers."""
    environment = {"cpu": "CPU 9000", "gpu": None, "threads": 1, "torch": "2.99"}
    rows = [
        {"arm": name, "val_loss": 5 - 0.001 * i, "tokens_per_s": 10_000.0 - i, "non_embedding": SIZES[name]}
        for i, name in enumerate(ARMS)
    ]
    rows[3] |= {"val_loss": None, "tokens_per_s": None}
    return {
        "rows": rows,
        "configs": {name: to_dict(presets.get(f"zoo/{name}")) for name in ARMS},
        "runs": [{"seed": 1, "val": [[0, 7.62], [480, 5.0]], "environment": environment}],
    }


def measured(share: float) -> dict[str, Any]:
    return {name: {"mean": share + i / 10} for i, name in enumerate(("share", "correlation", "self_weight"))}


SIMILARITY = {"windows": 9, "arms": {"key-identity": {"steps": 240, "start": measured(0.1), "trained": measured(0.5)}}}


def test_the_page_says_what_the_evidence_says(evidence: dict[str, Any]) -> None:
    page = TOOL["page"](evidence, SIMILARITY)
    assert "| `zoo/key-identity` | at the start | 0.100 | 0.200 | 0.300 |" in page
    assert "| `zoo/key-identity` | after 240 steps | 0.500 | 0.600 | 0.700 |" in page
    lines = {match[1]: line for line in page.splitlines() if (match := re.search(r"<br>`zoo/([^`]+)` \|", line))}
    assert lines.keys() == ARMS.keys()
    for i, (name, arm) in enumerate(ARMS.items()):
        cells = [cell.strip() for cell in lines[name].split("|")]
        assert cells[2] == arm.sentence
        assert cells[3].startswith(f"{SIZES[name]:,}")
        assert cells[4] == f"{accounting.count(arm.model).flops_per_token / 1e6:.2f} M"
        assert cells[5:7] == (["diverged"] * 2 if i == 3 else [f"{10_000 - i:,}", f"{5 - 0.001 * i:.3f}"])
    assert [line for line in page.splitlines() if line.startswith("## ")][:-1] == [f"## {group}" for group in zoo.ZOO]
    assert "240 steps of 1,024 tokens" in page
    assert "CPU 9000, threads: 1, torch 2.99" in page


def test_the_figure_has_a_dot_for_each_arm_that_did_not_diverge(evidence: dict[str, Any]) -> None:
    svg = ElementTree.fromstring(TOOL["figure"](evidence))
    dots = svg.findall("{*}circle")
    assert len(dots) == len(ARMS) - 1
    places = [float(dot.attrib["cx"]) for dot in dots]
    assert places == sorted(places, reverse=True)  # the invented losses fall
    labels = {text.text for text in svg.findall("{*}text")}
    assert labels >= {arm.label for arm in ARMS.values()}


def test_evidence_of_something_else_is_refused(evidence: dict[str, Any]) -> None:
    missing = {**evidence, "rows": evidence["rows"][:-1]}
    with pytest.raises(QurveError, match=f"different arms: {list(ARMS)[-1]}"):
        TOOL["page"](missing, SIMILARITY)
    other = copy.deepcopy(evidence)
    other["configs"]["res-gelu"]["model"]["query"]["scale"] = 0.25
    with pytest.raises(QurveError, match=r"the evidence of res-gelu is of another model: .*query\.scale"):
        TOOL["page"](other, SIMILARITY)
