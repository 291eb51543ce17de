"""What a model is trained and evaluated to predict. Configurations and the arithmetic of one batch; no torch here.

Every random choice is drawn per window, from the run's seed, the step and the window in training, and from the split
and the window in evaluation: the same for every arm, micro-batch and number of processes, with no state to resume.

Legend: N windows, T tokens of one (the model's context), W random words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from qurve.config import Choice, check_values, or_else
from qurve.errors import BadInput
from qurve.model.config import ModelConfig

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Int64s = npt.NDArray[np.int64]
    Draw = Callable[[int], npt.NDArray[np.uint64]]
    """`draw(W)`: random 64-bit words, `uint64[N, W]`; the same ones each time."""
    Prepared = tuple[Int64s, Int64s] | tuple[Int64s, Int64s, Int64s]
    """Inputs `[N, T]`, targets `[N, T]` and, where there are prefixes, their lengths `[N]`."""

IGNORED = -100
"""The target of a token whose prediction does not count."""


@dataclass(frozen=True)
class ObjectiveConfig(Choice):
    """Base of the kinds. Losses are means over the counted targets, of a step or an evaluation as a whole."""

    registry: ClassVar[dict[str, type[ObjectiveConfig]]]
    attends: ClassVar[Literal["causal", "bidirectional", "prefix"]]
    """The `model.attends` that it is for: with another one the answer would be visible, or half the text not."""
    loss_is_on: ClassVar[str | None] = None
    """Which tokens the loss is on, in the words of a report; None where it is on all of them."""

    def __post_init__(self) -> None:
        check_values(self)

    def check(self, model: ModelConfig) -> None:
        """Raise `BadInput`, naming the way out, for a model that cannot be trained so."""
        if model.attends != self.attends:
            fitting = next(name for name, kind in self.registry.items() if kind.attends == model.attends)
            raise BadInput(
                f"train.objective = {self.kind} is for model.attends = {self.attends}, and that is {model.attends}; "
                f"add --set model.attends={self.attends}, or --set train.objective={fitting}"
            )

    def check_data(self, model: ModelConfig, n_ids: int) -> None:
        """Raise `BadInput`, naming the way out, for data with the ids 0 … `n_ids` - 1 that it cannot do with."""

    def counted(self, windows: int, context: int, draw: Draw) -> int:
        """How many targets of so many windows count, together."""
        raise NotImplementedError

    def prepare(self, inputs_NT: Int64s, targets_NT: Int64s, model: ModelConfig, draw: Draw) -> Prepared:
        """What the model is given for windows and their successors; the arrays given may be changed."""
        raise NotImplementedError


@ObjectiveConfig.register("causal")
@dataclass(frozen=True)
class Causal(ObjectiveConfig):
    """Each token predicts the next one."""

    attends = "causal"

    def counted(self, windows: int, context: int, draw: Draw) -> int:
        return windows * context

    def prepare(self, inputs_NT: Int64s, targets_NT: Int64s, model: ModelConfig, draw: Draw) -> Prepared:
        return inputs_NT, targets_NT


@ObjectiveConfig.register("mlm")
@dataclass(frozen=True)
class MaskedTokens(ObjectiveConfig):
    """Masked language modelling, for encoders: hidden tokens are predicted from those on both sides.

    In each window exactly `round(rate * T)` tokens, at least one, give way to the mask and are predicted in its place.
    All of them do: BERT (arXiv 1810.04805) leaves or swaps a fifth, for the sake of later uses without masks.
    """

    rate: float = 0.15
    mask_id: int | None = field(default=None, metadata=or_else("the vocabulary's last"))
    """The id that stands for a hidden token; None takes the vocabulary's last row."""

    attends = "bidirectional"
    loss_is_on = "masked tokens"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.rate < 1:
            raise BadInput(f"train.objective.rate = {self.rate}: it must be above 0 and below 1")

    def mask_in(self, model: ModelConfig) -> int:
        """The mask's id, resolved."""
        return model.vocab_size - 1 if self.mask_id is None else self.mask_id

    def check(self, model: ModelConfig) -> None:
        super().check(model)
        if not 0 <= self.mask_in(model) < model.vocab_size:
            raise BadInput(
                f"train.objective.mask_id = {self.mask_id} is no row of a vocabulary of {model.vocab_size}; "
                "leave it out, which takes the last one"
            )

    def check_data(self, model: ModelConfig, n_ids: int) -> None:
        if (mask := self.mask_in(model)) < n_ids:
            ways_out = [] if self.mask_id is None else ["--set train.objective.mask_id=none"]
            if model.vocab_size <= n_ids:
                ways_out.append(f"--set model.vocab_size={(n_ids // 64 + 1) * 64}")
            raise BadInput(
                f"the mask needs an id of its own, and {mask} may be a token: the data has the ids 0 to {n_ids - 1}; "
                f"add {' '.join(ways_out)}"
            )

    def masked(self, context: int) -> int:
        """Masked tokens of one window."""
        return max(1, round(self.rate * context))

    def counted(self, windows: int, context: int, draw: Draw) -> int:
        return windows * self.masked(context)

    def prepare(self, inputs_NT: Int64s, targets_NT: Int64s, model: ModelConfig, draw: Draw) -> Prepared:
        context = inputs_NT.shape[1]
        rank_NT = draw(context).argsort(axis=1, kind="stable").argsort(axis=1)  # a random order of the tokens
        is_masked_NT = rank_NT < self.masked(context)
        targets_NT[:] = inputs_NT
        targets_NT[~is_masked_NT] = IGNORED
        inputs_NT[is_masked_NT] = self.mask_in(model)
        return inputs_NT, targets_NT


@ObjectiveConfig.register("prefix")
@dataclass(frozen=True)
class Prefix(ObjectiveConfig):
    """Prefix language modelling: tokens of a prefix all see each other, and each token after it is predicted.

    The prefix's length is drawn for each window, uniformly from 1 to T - 1. A prefix of P tokens leaves T + 1 - P
    targets: its last token predicts the first one after it. Source: the prefix LM of arXiv 1910.10683.
    """

    attends = "prefix"
    loss_is_on = "tokens after the prefix"

    def check(self, model: ModelConfig) -> None:
        super().check(model)
        if model.context < 2:
            raise BadInput("train.objective = prefix needs a prefix and something after it: model.context of 2 or more")

    def lengths(self, context: int, draw: Draw) -> Int64s:
        """Length of each window's prefix, `int64[N]`."""
        return 1 + (draw(1)[:, 0] % (context - 1)).astype("int64")

    def counted(self, windows: int, context: int, draw: Draw) -> int:
        return windows * (context + 1) - int(self.lengths(context, draw).sum())

    def prepare(self, inputs_NT: Int64s, targets_NT: Int64s, model: ModelConfig, draw: Draw) -> Prepared:
        lengths_N = self.lengths(inputs_NT.shape[1], draw)
        for targets_T, length in zip(targets_NT, lengths_N.tolist(), strict=True):
            targets_T[: length - 1] = IGNORED  # their successors are in the prefix, where they are seen
        return inputs_NT, targets_NT, lengths_N


def loss_is_on(kind: Any) -> str | None:
    """Which tokens the losses of a stored run's objective are on; None for all of them, and for an unknown kind."""
    known = ObjectiveConfig.registry.get(kind) if isinstance(kind, str) else None
    return known.loss_is_on if known else None
