"""Why does a nonlinear query bear higher learning rates? What is scale-invariant, and how fast can logits grow.

**Scale invariance.** Where the loss does not change with the size of a weight, `L(a w) = L(w)` for all `a > 0`, its
gradient is orthogonal to it (Euler): `<w, dL/dw> = 0`. An update then turns the weight and makes it longer, and only
the turn counts. Of the paper's layer `f(x) = LN(GELU(RMSNorm(x) W1) W2)`:

    W2                   invariant: the LN divides its size out (but for eps)
    W1, gain of RMSNorm  not: the GELU bends. With ReLU, or its square, they are (homogeneous, then divided out)
    x                    f(a x) = f(x), by the RMSNorm; Q(a x) is not, by the anchor
    gain of the LN       not: f is proportional to it

**Effective rate.** An update of Adam moves each entry of a weight by about the rate, so it turns a weight of root mean
square `r` by about `lr / r` radians. Under weight decay the length settles where decay and updates balance, and the
turn of a step at `sqrt(2 lr decay (1 - beta1) / (1 + beta1))`, whatever the size at the start, after some
`1 / (lr decay)` steps (random gradients; Kosson et al., arXiv 2305.17212).

**Degree of the logits.** With queries and keys from weights, logits are quadratic in them: all weights doubled, four
times the logits. With `Q = x` they are linear (arXiv 2510.23912), and with `(x + f(x)) / 2` too, once `f` is invariant.
`logit_degree` measures it: `d log(largest logit) / d log a` at weights `a W` of queries and keys.

**Growth with the rate.** If weights grow with the learning rate, then logits by its power of that degree. `growth` fits
the power to what trainings at several rates recorded (`eval.attention_logits`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qurve.analysis.attention_logits import has_logits, largest_logit
from qurve.analysis.mechanism import Window, evaluating, run
from qurve.model.attention import Attention
from qurve.model.config import ModelConfig
from qurve.model.gpt import GPT
from qurve.projections import Bottleneck, Dims, Linear, ProjectionConfig

STEP = 1.01
"""Factor by which weights are scaled up and down to measure a degree."""

# ----------------------------------------------------------------------------------------------------- scale invariance


def invariant_parameters(config: ModelConfig, layer: int) -> frozenset[str]:
    """The parameters of a block's projections whose size a norm divides out (but for its eps): `query.w2`, ….

    Under QK-norm the linear weights of queries and keys are among them. (A bias of the keys that no rotation turns has
    no effect either, but that is the softmax's doing.)
    """
    found = set()
    for name, (kind, dims) in config.projections(layer).items():
        found |= {f"{name}.{parameter}" for parameter in _invariant(kind, dims)}
        normed = config.qk_norm and config.at(layer).mixer.kind == "softmax" and name in ("query", "key")
        if normed and isinstance(kind, Linear) and not dims.bias:
            found.add(f"{name}.weight")
    return frozenset(found)


def _invariant(kind: ProjectionConfig, dims: Dims) -> set[str]:
    """Of a bottleneck whose post-norm sees nothing but what `W2` gives. A bias would be a part that is not scaled."""
    if not isinstance(kind, Bottleneck) or kind.post_norm == "none" or dims.bias:
        return set()
    if kind.norm_stage == "separate" and kind.anchor != "none":
        return set()
    inner = {"w1", "pre_gain"} if kind.activation in ("relu", "relu2", "identity") else set()
    return {"w2", *inner} & kind.parameters(dims).keys()


def radial_cosines(model: GPT, windows: Sequence[Window]) -> dict[str, float]:
    """Cosine of each matrix or gain with the loss's gradient for it, of the mean loss over `windows`, in evaluation.

    0 (to rounding and eps) where the loss does not depend on the weight's size; NaN where there is no gradient. The
    parameters' own gradients stay as they are.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros_like(p) for name, p in named.items()}
    with evaluating(model), torch.enable_grad():
        for window in windows:
            found = torch.autograd.grad(model.loss(*window), list(named.values()), allow_unused=True)
            for name, gradient in zip(named, found, strict=True):
                if gradient is not None:
                    sums[name] += gradient
    return {
        name: ((p.double() * sums[name]).sum() / (p.double().norm() * sums[name].double().norm())).item()
        for name, p in named.items()
    }


def effective_rate(weight: Tensor, lr: float) -> float:
    """Radians, about, by which one update of Adam at rate `lr` turns a weight: `lr / rms(weight)`; inf for zero."""
    size = weight.detach().double().square().mean().sqrt().item()
    return lr / size if size else math.inf


def settled_turn(lr: float, weight_decay: float, beta1: float = 0.9) -> float:
    """Radians by which a step of AdamW turns a scale-invariant weight once its length has settled."""
    return math.sqrt(2 * lr * weight_decay * (1 - beta1) / (1 + beta1))


# --------------------------------------------------------------------------------------------------------------- degree


@contextlib.contextmanager
def scaled(parameters: Iterable[nn.Parameter], factor: float) -> Iterator[None]:
    """Within the `with` block these parameters are `factor` times as large; afterwards bitwise what they were."""
    kept = [(p, p.detach().clone()) for p in parameters]
    with torch.no_grad():
        try:
            for p, _ in kept:
                p.mul_(factor)
            yield
        finally:
            for p, before in kept:
                p.copy_(before)


@dataclass(frozen=True)
class LogitDegree:
    layer: int
    together: float
    """Of all matrices of queries and keys."""
    query: float
    key: float


def logit_degree(model: GPT, windows: Sequence[Window]) -> list[LogitDegree]:
    """`d log(largest logit) / d log a` of every block with softmax logits, its inputs held fixed: 2 for linear queries
    and keys, 1 where the queries have no weight, 0 under QK-norm; NaN where every logit is zero.

    Differences of `STEP` up and down, so that in float32 the third digit is rounding.
    """
    calls: dict[int, list[tuple[Any, ...]]] = {}
    attentions: dict[int, Attention] = {}
    handles = []
    for layer, block in enumerate(model.blocks):
        mixer = block.get_submodule("attention")
        if isinstance(mixer, Attention) and has_logits(mixer):
            attentions[layer], seen = mixer, calls.setdefault(layer, [])
            handles.append(mixer.register_forward_pre_hook(lambda module, inputs, seen=seen: seen.append(inputs)))
    try:
        with evaluating(model):
            for window in windows:
                run(model, window)
    finally:
        for handle in handles:
            handle.remove()
    found = []
    for layer, attention in attentions.items():
        parts = [[p for p in part.parameters() if p.dim() == 2] for part in (attention.query, attention.key)]
        degrees = [_degree(attention, weights, calls[layer]) for weights in (parts[0] + parts[1], *parts)]
        found.append(LogitDegree(layer, *degrees))
    return found


@torch.no_grad()
def _degree(attention: Attention, weights: list[nn.Parameter], calls: list[tuple[Any, ...]]) -> float:
    logs = []
    for factor in (STEP, 1 / STEP):
        with scaled(weights, factor):
            largest = max(_largest(attention, call) for call in calls)
            logs.append(math.log(largest) if largest else math.nan)
    return (logs[0] - logs[1]) / (2 * math.log(STEP))


def _largest(attention: Attention, call: tuple[Any, ...]) -> float:
    inputs, view, hidden, _ = call
    q_BHTE, k_BGTE, _ = attention.enter(inputs, view, hidden, None)
    return largest_logit(q_BHTE, k_BGTE, view, attention.config.window, attention.config.scale).item()


# --------------------------------------------------------------------------------------------------------------- growth


@dataclass(frozen=True)
class Growth:
    """`largest logit ~ rate ** power`, least squares in logarithms."""

    power: float
    low: float
    high: float
    """Ends of the 95 % t interval; infinite for two points."""
    points: int


def growth(points: Iterable[tuple[float, float]]) -> Growth:
    """The power from pairs of a learning rate and a training's largest logit. `ValueError` for fewer than two rates.

    Leave out trainings that diverged: what they recorded depends on when they were stopped.
    """
    from scipy.special import stdtrit

    pairs = [(math.log(rate), math.log(logit)) for rate, logit in points]
    n = len(pairs)
    if len({x for x, _ in pairs}) < 2:
        raise ValueError(f"{n} trainings at one rate have no growth with it; give at least two rates")
    x_mean, y_mean = (sum(values) / n for values in zip(*pairs, strict=True))
    spread = sum((x - x_mean) ** 2 for x, _ in pairs)
    power = sum((x - x_mean) * (y - y_mean) for x, y in pairs) / spread
    squares = sum((y - y_mean - power * (x - x_mean)) ** 2 for x, y in pairs)
    half = math.inf if n == 2 else float(stdtrit(n - 2, 0.975)) * math.sqrt(squares / (n - 2) / spread)
    return Growth(power, power - half, power + half, n)


def growth_by_arm(trainings: Iterable[tuple[str, float, float | None]]) -> dict[str, Growth]:
    """`growth` of each architecture, from `(arm, rate, largest logit)` of the trainings of a study that finished.

        growth_by_arm((e.arm, e.lr, e.max_logit) for e in endings if e.status == "finished")

    with `qurve.study.stability.endings_of`. Trainings without a record, and architectures with one rate, are left out.
    """
    points: dict[str, list[tuple[float, float]]] = {}
    for arm, rate, logit in trainings:
        if logit is not None and logit > 0:
            points.setdefault(arm, []).append((rate, logit))
    return {arm: growth(found) for arm, found in points.items() if len({rate for rate, _ in found}) > 1}
