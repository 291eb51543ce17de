"""Settings in words: what is not there, what is None, and what is taken in its place are told apart."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from fake_study import BASELINE, NONLINEAR, arm, config, write_study

from qurve import zoo  # noqa: F401 - registers its kinds
from qurve.config import Choice, apply_settings, in_place_of_none, to_dict
from qurve.study.page.sections import _changed
from qurve.study.results import load
from qurve.study.settings import in_words, setting_in_words
from qurve.study.tables import NONE
from qurve.train.config import RunConfig
from tiny import TINY

NOTHING = {"data.path", "data.fingerprint", "train.stop_at", "train.checkpoint_every", "train.keep_every"}
NOTHING |= {"train.dynamics_every", "train.loss_bound", "train.parallel"}
NOTHING |= {"model.attention_softcap", "model.logit_softcap"}
"""Settings that are off where they are None."""


def optional(cls: Any, path: str = "", above: tuple[Any, ...] = ()) -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Every field below a configuration that may be None, of every kind, as `model.query.width`."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint, here = hints[field.name], f"{path}{field.name}"
        kinds = hint.registry.values() if isinstance(hint, type) and issubclass(hint, Choice) else [hint]
        for kind in kinds:
            if dataclasses.is_dataclass(kind) and kind not in above:  # one may hold another of its kind
                yield from optional(kind, f"{here}.", (*above, kind))
        if type(None) in typing.get_args(hint):
            yield here, field


OPTIONAL = dict(optional(RunConfig))


def test_every_setting_that_may_be_none_says_what_takes_its_place_or_that_nothing_does() -> None:
    assert {"model.query.width", "model.key.width", "model.mixer.hidden", "train.horizon"} <= set(OPTIONAL)
    assert {path for path, field in OPTIONAL.items() if "or_else" not in field.metadata} == NOTHING


@pytest.mark.parametrize("path", ["model.n_kv_heads", "train.horizon", "train.stop_at", "data.order_seed"])
def test_none_is_no_dash(path: str) -> None:
    assert getattr(getattr(TINY, path.split(".")[0]), path.split(".")[1]) is None
    words = setting_in_words(to_dict(TINY), path)
    assert words == in_place_of_none(TINY, path) == OPTIONAL[path].metadata.get("or_else", "none") != NONE


def test_what_is_not_there_is_a_dash() -> None:
    bottleneck = to_dict(apply_settings(TINY, ["model.query=bottleneck"]))
    assert setting_in_words(bottleneck, "model.query.width") == "D / 2"
    assert setting_in_words({**bottleneck, "format": 1}, "model.query.width") == "D / 2"
    assert setting_in_words(to_dict(TINY), "model.query.width") == NONE
    assert setting_in_words(to_dict(TINY), "model.query.kind.of") == NONE
    assert setting_in_words({"model": {"query": {"kind": "unknown", "width": None}}}, "model.query.width") == "none"
    assert setting_in_words(to_dict(TINY), "train.lr") == in_words(0.01) == "0.01"


def test_the_table_of_what_differed_tells_a_default_from_what_is_not_there(tmp_path: Any) -> None:
    query = {"kind": "bottleneck", "width": None, "scale": 0.5}
    wide = arm("wide", "Wide", config=config(model__query={**query, "width": 32}))
    results = load(write_study(tmp_path, (BASELINE, {**NONLINEAR, "config": config(model__query=query)}, wide)))
    row = re.search(r"<tr><td><code>model.query.width</code></td>(.*?)</tr>", _changed(results))
    assert row is not None
    cells = re.findall(r"<td( class=\"changed\")?>([^<]*)</td>", row[1])
    assert [(bool(shaded), words) for shaded, words in cells] == [(False, NONE), (True, "D / 2"), (True, "32")]
