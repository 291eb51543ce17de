"""What may be called matched, at the baseline's best point: nothing else leaves the family of tests of its own arms."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from qurve.config import to_dict
from qurve.errors import BadInput
from qurve.study.definition import Arm, Study
from qurve.study.search import Search
from qurve.study.study_json import check_study
from qurve.train.config import RunConfig
from tiny import tiny


def study_of(wide: RunConfig) -> Study:
    return Study("tiny", "A tiny study", (Arm("baseline", "Baseline", tiny()), Arm("wide", "Wide", wide)), (1, 2))


FOUND = {"axes": ["train.lr"], "seeds": [101], "steps": 4, "scores": []}


def settled() -> Study:
    """Both arms at their own points, and the wider one at the baseline's too."""
    points = {name: {"point": {"train.lr": lr}, "val_loss": 3.0} for name, lr in (("baseline", 0.1), ("wide", 0.2))}
    return study_of(tiny("model.d_ff=96")).settled({**FOUND, "chosen": points})


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (
            {"config": tiny("model.d_ff=96", "train.lr=0.3")},
            r"at the baseline's best point, and has train\.lr = 0\.3 where",
        ),
        ({"config": tiny("model.d_ff=128", "train.lr=0.1")}, r"matched with wide, and differs from it in model\.d_ff"),
        ({"config": tiny("model.d_ff=96", "train.lr=0.1", "train.beta2=0.9")}, r"differs from it in train\.beta2"),
        *(
            ({"matched": name}, f"matched with '{name}', which is none")
            for name in ("nobody", "baseline", "wide@baseline")
        ),
    ],
)
def test_an_arm_is_matched_if_it_is_another_one_at_the_baselines_point(change: dict[str, Any], refused: str) -> None:
    """In the arms that somebody gives, and in a `study.json` that somebody has edited."""
    study = settled()
    *own, matched = study.arms
    assert (matched.name, matched.matched, matched.config.train.lr) == ("wide@baseline", "wide", 0.1)
    with pytest.raises(BadInput, match=refused):
        dataclasses.replace(study, arms=(*own, dataclasses.replace(matched, **change)))
    tree = json.loads(study.to_json("qurve compare"))
    check_study(tree)
    tree["arms"][2] |= {**change, **({"config": to_dict(change["config"])} if "config" in change else {})}
    with pytest.raises(BadInput, match=refused):
        check_study(tree)


def test_what_is_matched_comes_from_a_search() -> None:
    """Nothing else leaves the family of tests of the study's own arms."""
    study = settled()
    for chosen in ({}, {"baseline": {"point": None, "val_loss": None}}):
        with pytest.raises(BadInput, match="and no search has chosen one; such arms are made after a search"):
            dataclasses.replace(study, search={**FOUND, "chosen": chosen})
    both = 'eval.splits=["val","test"]'
    for search in (None, Search({"train.lr": (0.1, 0.2)})):
        with pytest.raises(BadInput, match="such arms are made after a search"):
            dataclasses.replace(study.change([both]), search=search)
    own = dataclasses.replace(study.arms[1], matched="wide")
    with pytest.raises(BadInput, match="wide is called matched with 'wide', which is none of the arms"):
        dataclasses.replace(study, arms=(study.arms[0], own))


def test_a_projection_that_was_searched_may_be_matched() -> None:
    point = {"model.query": "identity", "train.lr": 0.1}
    chosen = {
        "baseline": {"point": point, "val_loss": 3.0},
        "wide": {"point": {"model.query": "linear", "train.lr": 0.2}, "val_loss": 3.0},
    }
    study = study_of(tiny("model.d_ff=96", "model.query=bottleneck"))
    assert study.settled({**FOUND, "axes": [*point], "chosen": chosen}).arms[2].matched == "wide"
