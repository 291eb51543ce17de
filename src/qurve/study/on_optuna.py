"""The sampler of Optuna: each arm's points are proposed from its earlier ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from qurve.errors import BadInput
from qurve.study.axes import Range, Value, rounded
from qurve.study.search import Configs, Losses, Places, Search


def places(search: Search, configs: Configs, losses: Losses, points: Mapping[str, int]) -> Places:
    """The proposals of every arm, as many as `points` says, up to the first that has no loss yet."""
    optuna = _import_optuna()
    wanted: Places = {}
    for arm, config in configs.items():
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=search.draw_seed))
        wanted[arm] = []
        for _ in range(points[arm]):
            asked = study.ask()
            point = search.point([_suggested(asked, axis, values) for axis, values in search.space.items()])
            wanted[arm].append((point, config.train.steps))
            if not losses.has(arm, point, config.train.steps):
                break
            mean = losses.mean(arm, point, config.train.steps)
            study.tell(asked, math.inf if mean is None else mean)
    return wanted


def _suggested(asked: Any, axis: str, values: Sequence[Value] | Range) -> Any:
    if isinstance(values, Range):
        return rounded(asked.suggest_float(axis, values.low, values.high, log=values.log))
    return asked.suggest_categorical(axis, list(values))


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise BadInput("Optuna is not installed: pip install 'qurve[search]', or take another sampler") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
