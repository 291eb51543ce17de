"""How long training will take: by the speed of the same model, where it was timed, or by FLOPs. Always an estimate."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from qurve import accounting
from qurve.config import from_dict
from qurve.errors import BadInput
from qurve.model.config import ModelConfig
from qurve.study.noise import Known
from qurve.train.config import RunConfig


@dataclass(frozen=True)
class Pace:
    """What is known of speed."""

    timed: tuple[tuple[ModelConfig, float], ...]
    """Models, each with its training tokens per second."""
    flops_per_s: float
    """What every other model is taken to reach, in training FLOPs."""
    of_flops: str
    """Where that is from, in words."""
    source: str | None
    """The study that was timed; None where none was."""
    machine: str

    def seconds(self, model: ModelConfig, tokens: int) -> tuple[float, bool]:
        """What training on so many tokens takes, and whether the model itself was timed."""
        speeds = [speed for timed, speed in self.timed if timed == model]
        if speeds:
            return tokens / statistics.median(speeds), True
        return tokens * accounting.count(model).flops_per_token / self.flops_per_s, False


def pace_of(known: Known) -> Pace | None:
    """By a study that was made: models are matched by what they are, not by their arms' names. None without speeds."""
    timed = []
    for arm, speed in known.speeds.items():
        if arm not in known.configs:
            continue
        tree = {key: value for key, value in known.configs[arm].items() if key != "format"}
        try:
            timed.append((from_dict(RunConfig, tree).model, speed))
        except BadInput:  # of kinds that are not known here
            continue
    if not timed:
        return None
    rate = statistics.median(speed * accounting.count(model).flops_per_token for model, speed in timed)
    return Pace(tuple(timed), rate, "which the models that were timed reached", known.source, known.machine)


def pace_here(config: RunConfig) -> Pace:
    """By this machine's matrix products, measured now, as `qurve plan` takes them for one run."""
    from qurve.train.plan import ASSUMED_UTILISATION, matrix_peak
    from qurve.train.runtime import available_cores, resolve_device, resolve_precision

    device = resolve_device(config.train.device)
    precision = resolve_precision(config.train.precision, device.partition(":")[0])
    peak = matrix_peak(device, precision, config.train.threads or available_cores())
    share = f"{100 * ASSUMED_UTILISATION:.0f} % of what a matrix product reaches on this machine"
    return Pace((), ASSUMED_UTILISATION * peak, f"{share} ({device}, {precision})", None, device)
