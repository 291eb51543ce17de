"""Settings of a configuration in words, as the tables of a report have them."""

from __future__ import annotations

import json
from typing import Any

from qurve.config import differences, from_dict, in_place_of_none
from qurve.errors import BadInput
from qurve.study.results import StudyResults
from qurve.study.tables import NONE, rate


def setting_in_words(tree: dict[str, Any], path: str) -> str:
    """The setting at `path` of a configuration's JSON tree.

    A dash where there is no such setting (of another kind of projection, say); where it is None, what is taken instead.
    """
    node: Any = tree
    for name in path.split("."):
        if not isinstance(node, dict) or name not in node:
            return NONE
        node = node[name]
    return _instead(tree, path) if node is None else in_words(node)


def _instead(tree: dict[str, Any], path: str) -> str:
    from qurve.train.config import RunConfig

    try:
        return in_place_of_none(from_dict(RunConfig, {k: v for k, v in tree.items() if k != "format"}), path)
    except (BadInput, AttributeError):  # of kinds, or of a version, that are not known here
        return "none"


def changed_settings(results: StudyResults) -> list[tuple[str, list[str], list[bool]]]:
    """The settings in which any arm differs from the baseline: (path, value of each arm, whether it differs)."""
    paths = dict.fromkeys(
        path
        for arm in results.others
        for path in differences(results.baseline.config, arm.config)
        if path != "train.seed"  # every arm has every seed
    )
    table = []
    for path in paths:
        values = [setting_in_words(arm.config, path) for arm in results.arms]
        reference = setting_in_words(results.baseline.config, path)
        table.append((path, values, [value != reference for value in values]))
    return table


def in_words(value: Any) -> str:
    """A value of a configuration or an environment; a dash for None."""
    if value is None:
        return NONE
    if isinstance(value, float):
        return rate(value)
    return value if isinstance(value, str) else json.dumps(value)
