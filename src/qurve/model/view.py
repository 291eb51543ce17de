"""Who may see whom in one forward pass, and where each token stands.

Legend: B batch, T new tokens, S all tokens (those of the cache and the new ones), E head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Attends = Literal["causal", "bidirectional", "prefix"]
Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class View:
    """One forward pass over `length` tokens that follow `start` others; made by `GPT`, read by mixers."""

    attends: Attends
    start: int
    length: int
    device: torch.device
    padding_B: Tensor | None = None
    """How many tokens at the left of each sequence are padding."""
    prefix_B: Tensor | None = None
    """How many tokens at the beginning of each sequence (padding counted) all see each other, whatever the window."""
    allowed_BTT: Tensor | None = None
    """Further limits: false where a token (second axis) may not see another (third axis). `[B or 1, T, T]`. A token
    that may see nothing sees itself: its softmax has to be one of something."""
    rotation: Rotation | None = None
    """Cosines and sines of rotary positions."""

    @property
    def real_BT(self) -> Tensor | None:
        """False where one of the new tokens is padding; None when none is."""
        if self.padding_B is None:
            return None
        at_T = torch.arange(self.start, self.start + self.length, device=self.device)
        return at_T >= self.padding_B[:, None]

    def positions_BT(self) -> Tensor:
        """Where the new tokens stand, counted from each sequence's first real token: `[B or 1, T]`."""
        at_T = torch.arange(self.start, self.start + self.length, device=self.device)
        return at_T[None] if self.padding_B is None else (at_T - self.padding_B[:, None]).clamp(min=0)

    def mask(self, window: int | None = None) -> tuple[Tensor | None, bool]:
        """The mask `[B or 1, 1, T, S]`, true where a token may look, and whether it is no more than causal.

        None stands for one that need not be written out: everything is visible, or (true) all before and itself.
        """
        plain = window is None and self.padding_B is None and self.prefix_B is None and self.allowed_BTT is None
        if plain and (self.attends == "bidirectional" or self.length == 1):
            return None, False
        if plain and self.start == 0:
            return None, True
        to_S = torch.arange(self.start + self.length, device=self.device)
        at_T1 = to_S[self.start :, None]
        mask = torch.ones_like(at_T1 >= to_S) if self.attends == "bidirectional" else at_T1 >= to_S
        if window is not None:
            mask = mask & ((at_T1 - to_S).abs() < window)
        mask = mask[None, None]
        if self.prefix_B is not None:
            mask = mask | (to_S < self.prefix_B[:, None, None, None]) & (at_T1 < self.prefix_B[:, None, None, None])
        if self.padding_B is not None:
            # Padding sees itself, so that its softmax is one of something; nobody else sees it.
            mask = mask & (to_S >= self.padding_B[:, None, None, None]) | (at_T1 == to_S)
        if self.allowed_BTT is not None:
            mask = mask & self.allowed_BTT[:, None]
            mask = mask | ((at_T1 == to_S) & ~mask.any(-1, keepdim=True))
        return mask, False
