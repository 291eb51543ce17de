"""transformers' caches under our model: keys and values go into their layers, any other state into layers of our own.

So `generate` works with whatever cache it makes (dynamic, static, quantised; offloaded, where all is keys and values on
a GPU), and reorders, repeats and crops it as it does for any model. Only the pages of continuous batching are refused.

Legend: B sequences, G key/value heads, T new tokens, S all tokens so far, E head width, K chosen sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache as HubCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from qurve.errors import BadInput
from qurve.model.cache import Cache, KeysValues, State
from qurve.model.config import ModelConfig
from qurve.model.mixers import Softmax


class HeldCache(Cache):
    """What our model reads and writes, for one forward pass, of a cache that transformers keeps.

    Raises `BadInput` for one that is offloaded where it cannot be.
    """

    def __init__(
        self,
        held: HubCache,
        config: ModelConfig,
        batch: int,
        padding_B: Tensor | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.context, self.padding_B = config.context, padding_B
        self._filled = int(held.get_seq_length())
        self._layers = _own_layers(held, config)
        if held.offloading:
            _check_offloading(device, list(self._layers))
        self.states = []
        for layer in range(config.n_layers):
            if (own := self._layers.get(layer)) is None:
                self.states.append(InLayer(held, layer))
                continue
            if own.state is None:
                here = config.at(layer)
                own.state, own.room = here.mixer.state(here, batch, 1, device=device, dtype=dtype), 1
            self.states.append(own.state)

    @property
    def filled(self) -> int:
        return self._filled

    @filled.setter
    def filled(self, length: int) -> None:  # their own layers count for themselves
        self._filled = length
        for own in self._layers.values():
            own.length = length

    def reserve(self, length: int) -> None:
        for own in self._layers.values():
            own.reserve(length, self.context)


class InLayer(KeysValues):
    """Keys and values of one block in a layer of theirs."""

    def __init__(self, held: HubCache, layer: int) -> None:
        self._held, self._layer = held, layer

    def extend(self, start: int, k_BGTE: Tensor, v_BGTE: Tensor) -> tuple[Tensor, Tensor]:
        end = start + k_BGTE.shape[2]
        keys, values = self._held.update(k_BGTE, v_BGTE, self._layer)  # with room behind, where it is static
        return keys[:, :, :end].to(k_BGTE.dtype), values[:, :, :end].to(v_BGTE.dtype)


class StateLayer(CacheLayerMixin):  # type: ignore[misc]
    """One block's decoding state that is not keys and values alone (sums over the past, say), as a layer of a cache."""

    is_compileable = False
    supports_early_init = False
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.state: State | None = None
        self.length = self.room = 0

    def reserve(self, length: int, context: int) -> None:
        """Make room for `length` tokens in all, and for more of them each time."""
        if self.state is not None and length > self.room:
            self.room = max(length, min(2 * self.room, context))
            self.state.grow(self.room)

    @property
    def is_croppable(self) -> bool:
        """Only what has a place for each token can be set back: a sum does not forget its last term."""
        return self.state is None or set(vars(self.state)) == set(self.state.per_token)

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def reset(self) -> None:
        self.state, self.length, self.room = None, 0, 0

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove and not self.is_croppable:
            raise ValueError(
                "this model's decoding state cannot be set back by some tokens (a sum over the past, or a "
                "convolution's last tokens): assisted decoding and the like are not for it"
            )
        self.length -= abs(tokens_to_remove)

    def _select(self, rows_K: Tensor) -> None:
        if self.state is not None:
            self.state.select(rows_K.to(next(iter(vars(self.state).values())).device), 0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            batch = len(next(iter(vars(self.state).values())))
            self._select(torch.arange(batch).repeat_interleave(repeats))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError("a state that is not keys and values has none to begin with")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("a state that is not keys and values takes none")


def _own_layers(held: HubCache, config: ModelConfig) -> dict[int, StateLayer]:
    """The layers of a cache that hold a state of ours, by block; put there now, if the cache is a new one."""
    ours = [layer for layer in range(config.n_layers) if type(config.at(layer).mixer) is not Softmax]
    found: dict[int, StateLayer] = {}
    for layer in ours:
        while len(held.layers) <= layer:
            held.layers.append(DynamicLayer())
        if not isinstance(held.layers[layer], StateLayer):
            held.layers[layer] = StateLayer()
        found[layer] = held.layers[layer]
    return found


def _check_offloading(device: torch.device, ours: list[int]) -> None:
    """An offloaded cache fetches the next layer while one is used: where that is one of ours, another stays away."""
    if ours:
        raise BadInput(
            f"an offloaded cache moves keys and values alone, and block {ours[0]} keeps another state: take a cache "
            "that is not offloaded"
        )
    if device.type != "cuda":
        raise BadInput(
            f"an offloaded cache takes keys and values off a GPU, and this model is on the {device.type}: take a cache "
            "that is not offloaded"
        )
