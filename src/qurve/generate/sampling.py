"""Which token comes next: pure functions over logits `[B, V]`, and `Sampling`, which puts them in their order.

Every rule is a bound on logits or probabilities, so tokens that are equally likely are kept or left out together, and
what is kept of one sequence depends on nothing else in the batch.

Legend: B batch, V vocabulary (the tokenizer's ids alone: rows that pad an embedding are not there).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qurve.errors import BadInput, QurveError

LIKELY = (256, 4096)
"""Tokens that are sorted at first for top-p: often enough, and much cheaper than the whole vocabulary."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. The rules act in this order; the defaults draw from the model's own distribution.

    Raises `BadInput` for a value that is out of its range.
    """

    repetition_penalty: float = 1.0
    """Logits of tokens that are in the prompt or the text so far: divided by it where above zero, else multiplied
    (Keskar et al., arXiv 1909.05858)."""
    temperature: float = 1.0
    """Logits are divided by it. 0 takes the likeliest token always, and makes no use of the rules that follow."""
    top_k: int | None = None
    """Keep the k likeliest tokens."""
    top_p: float | None = None
    """Keep the likeliest tokens that have this probability together (Holtzman et al., arXiv 1904.09751)."""
    min_p: float | None = None
    """Keep tokens that are at least this share as likely as the likeliest (Nguyen et al., arXiv 2407.01082)."""
    seed: int = 0
    """Of the random numbers: every text's stream begins from it, its prompt and its sample."""

    def __post_init__(self) -> None:
        # Beyond these, float32 has no numbers for what comes of the logits.
        for name in ("repetition_penalty", "temperature"):
            value = getattr(self, name)
            if not (1e-30 <= value <= 1e30 or (value == 0 and name == "temperature")):
                bound = "0, or 1e-30 to 1e30" if name == "temperature" else "1e-30 to 1e30"
                raise BadInput(f"{name} = {value}: it must be {bound}")
        for name, least in (("top_k", 1), ("seed", 0)):
            count = getattr(self, name)
            if count is not None and (not isinstance(count, int) or count < least):
                raise BadInput(f"{name} = {count!r}: it must be a whole number, at least {least}")
        for name in ("top_p", "min_p"):
            share = getattr(self, name)
            if share is not None and not (0 < share <= 1 or (name == "min_p" and share == 0)):
                bound = "above 0" if name == "top_p" else "at least 0"
                raise BadInput(f"{name} = {share}: it must be {bound} and at most 1")

    def probabilities(self, logits_BV: Tensor) -> Tensor:
        """What is drawn from, `[B, V]`, of logits that the penalty has been through; for a temperature above zero."""
        # the largest becomes zero first, so that no temperature makes it infinite
        logits_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)) / self.temperature
        if self.top_k is not None:
            logits_BV = keep_top_k(logits_BV, self.top_k)
        if self.top_p is not None and self.top_p < 1:
            logits_BV = keep_top_p(logits_BV, self.top_p)
        if self.min_p is not None:
            logits_BV = keep_min_p(logits_BV, self.min_p)
        return logits_BV.softmax(-1)

    def choose(self, logits_BV: Tensor, seen_BV: Tensor | None, chances: Sequence[torch.Generator]) -> list[int]:
        """One token for each sequence. `seen_BV`: true for the tokens that the penalty is for; `chances`: each
        sequence's stream of random numbers. Raises `QurveError` when a logit is not a finite number.
        """
        if not logits_BV.sum().isfinite():
            raise QurveError("the model's logits are not finite: its weights are damaged, or its training diverged")
        if seen_BV is not None:
            logits_BV = penalized(logits_BV, seen_BV, self.repetition_penalty)
        if self.temperature == 0:
            return logits_BV.argmax(-1).tolist()
        uniform_B = torch.stack([torch.rand((), dtype=torch.float64, generator=chance) for chance in chances])
        return draw(self.probabilities(logits_BV), uniform_B.to(logits_BV.device)).tolist()


def penalized(logits_BV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """Logits with those that were seen made less likely (by a penalty above one)."""
    return torch.where(seen_BV, torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty), logits_BV)


def keep_top_k(logits_BV: Tensor, k: int) -> Tensor:
    """Minus infinity for what is less likely than the k-th likeliest."""
    least_B1 = logits_BV.topk(min(k, logits_BV.shape[-1])).values[:, -1:]
    return logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)


def keep_top_p(logits_BV: Tensor, p: float) -> Tensor:
    """Minus infinity for what is less likely than the last token that it takes to reach the probability `p`."""
    p_BV, vocabulary = logits_BV.softmax(-1), logits_BV.shape[-1]
    for count in (*(count for count in LIKELY if count < vocabulary), vocabulary):
        likely_BC = p_BV.topk(count).values
        total_BC = likely_BC.cumsum(-1, dtype=torch.float64)
        if (total_BC[:, -1] >= p).all():
            break
    needed_B1 = (total_BC < p).sum(-1, keepdim=True).clamp(max=count - 1)
    return logits_BV.masked_fill(p_BV < likely_BC.gather(1, needed_B1), -torch.inf)


def keep_min_p(logits_BV: Tensor, p: float) -> Tensor:
    """Minus infinity for what is less than `p` times as likely as the likeliest."""
    p_BV = logits_BV.softmax(-1)
    return logits_BV.masked_fill(p_BV < p * p_BV.amax(-1, keepdim=True), -torch.inf)


def draw(p_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The token `[B]` at which the probabilities, summed up by id, pass `uniform_B` (in [0, 1)) of their total."""
    total_BV = p_BV.cumsum(-1, dtype=torch.float64)
    all_B = total_BV[:, -1]
    aim_B = torch.minimum(uniform_B * all_B, torch.nextafter(all_B, torch.zeros_like(all_B)))
    return torch.searchsorted(total_BV, aim_B[:, None], right=True)[:, 0]
