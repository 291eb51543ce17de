"""`QurveForCausalLM`: our model as a Hugging Face model. It wraps `qurve.model.gpt.GPT`; there is no second model.

Legend: B sequences, T new tokens, S all tokens (those of the cache and the new ones), V vocabulary.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache as HubCache
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple

from qurve.errors import BadInput
from qurve.hf.cache import HeldCache
from qurve.hf.configuration import STUB, QurveConfig
from qurve.model.attention import Attention, attend, written_out
from qurve.model.gpt import GPT

STUB_TEXT = '''\
"""Names this folder's model to transformers, for `trust_remote_code=True`. Its code is that of the package qurve."""

try:
    from qurve.hf import QurveConfig, QurveForCausalLM
except ImportError as error:
    raise ImportError(
        f"this is a model of the package qurve, which cannot be imported here ({error}): pip install 'qurve[hf]'"
    ) from error

__all__ = ["QurveConfig", "QurveForCausalLM"]
'''


class QurveForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """`QurveForCausalLM(QurveConfig(qurve=ModelConfig(...)))`; `.gpt` is the model itself, which does all the work.

    A model of `attends = bidirectional` takes labels that are not shifted, and does not generate. One of
    `attends = prefix` takes `prefix_lengths` `[B]`, padding counted; `generate` takes the prompt for the prefix.
    """

    config: QurveConfig
    config_class = QurveConfig
    base_model_prefix = "gpt"
    main_input_name = "input_ids"
    _no_split_modules = ["Block"]  # noqa: RUF012  (theirs; so below)
    _supports_sdpa = True
    _supports_flex_attn = True
    supports_gradient_checkpointing = True

    def __init__(self, config: QurveConfig) -> None:
        if "cache" not in CausalLMOutputWithPast.__dataclass_fields__:  # it has another name in older ones
            raise BadInput(
                f"this model needs transformers 5.24 or newer, and this is {transformers.__version__}: pip install "
                "'qurve[hf]'"
            )
        super().__init__(config)
        self.gpt = GPT(config.model)
        for module in self.gpt.modules():
            if isinstance(module, Attention):
                module.attending = functools.partial(attend_as, config)
        self.gradient_checkpointing = False
        self.loss_type = "ForMaskedLM" if config.model.attends == "bidirectional" else "ForCausalLM"
        self.post_init()

    def init_weights(self) -> None:
        """Nothing: `GPT` has drawn them."""

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing: a saved folder names our classes by itself, and no code is copied into it."""

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As ever, but half a checkpoint is refused: parameters missing, unexpected, or of another shape."""
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        wrong = {what: sorted(map(str, info[f"{what}_keys"])) for what in ("missing", "unexpected", "mismatched")}
        if any(wrong.values()):
            told = "; ".join(f"{what}: {_some(keys)}" for what, keys in wrong.items() if keys)
            raise BadInput(f"{args[0] if args else 'the checkpoint'}: its parameters are not this model's; {told}")
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """As ever, and with the small file that names our classes to those who trust the folder."""
        if not os.path.isfile(save_directory):
            os.makedirs(save_directory, exist_ok=True)
            (Path(save_directory) / f"{STUB}.py").write_text(STUB_TEXT, encoding="utf-8")
        super().save_pretrained(save_directory, *args, **kwargs)

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")  # type: ignore[untyped-decorator]
    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: HubCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        prefix_lengths: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits `[B, T, V]` (of the last `logits_to_keep` tokens, or of those at these places), and with `labels`
        the loss: mean over the labels that are not -100, or their sum over `num_items_in_batch`.

        `attention_mask`: `[B, S]`, zero on padding, at the left or (in a call without a cache) at the right; or
        `[B or 1, 1, T, T]`, what may be seen besides the model's own rules. `position_ids` are counted by the model,
        from each sequence's first real token; other ones are refused. A cache is made where `use_cache` asks for it,
        by default outside of training and without gradients.
        """
        config = self.config.model
        if input_ids is None or kwargs.get("inputs_embeds") is not None:
            raise BadInput("this model takes input_ids, and no inputs_embeds")
        for what in ("output_attentions", "output_hidden_states"):
            if kwargs.get(what):
                raise BadInput(f"{what}: this model does not hand them out; hook the modules of model.gpt.blocks")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and not torch.is_grad_enabled()
        if config.attends == "bidirectional" or (self.training and self.gradient_checkpointing):
            if cache is not None and int(cache.get_seq_length()):
                raise BadInput("a cache with tokens in it has no place where blocks run twice, or see tokens to come")
            use_cache, cache = False, None
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        start = 0 if cache is None else int(cache.get_seq_length())
        limits = _limits(
            attention_mask, position_ids, input_ids, start, cached=cache is not None, attends=config.attends
        )
        if config.attends == "prefix" and start == 0:
            if prefix_lengths is None:
                raise BadInput("this model attends to a prefix: give prefix_lengths, one number a sequence")
            limits["prefix_B"] = prefix_lengths.to(input_ids.device)
        held = None
        if cache is not None:
            weight, padding_B = self.gpt.head_weight, limits.pop("padding_B", None)
            held = HeldCache(cache, config, len(input_ids), padding_B, device=input_ids.device, dtype=weight.dtype)
        hidden_BTD, balances = self.gpt.hidden(input_ids, held, **limits)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits_BTV = self.gpt.logits(hidden_BTD[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits_BTV,
                labels=labels,
                vocab_size=config.vocab_size,
                num_items_in_batch=num_items_in_batch,
                **{name: kwargs[name] for name in ("shift_labels", "ignore_index") if name in kwargs},
            )
            if self.training and balances:
                balance = torch.stack(balances).mean()
                if num_items_in_batch is not None:  # this call's share of the step
                    counted = labels if config.attends == "bidirectional" else labels[:, 1:]
                    balance = balance * ((counted != -100).sum() / num_items_in_batch)
                loss = loss + balance
        return CausalLMOutputWithPast(loss=loss, logits=logits_BTV, cache=cache)

    # ------------------------------------------------------------------------------------------------- what they ask

    def get_input_embeddings(self) -> nn.Module:
        return self.gpt.token_embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.gpt.token_embedding = value

    def get_output_embeddings(self) -> nn.Module | None:
        """None where the head is the embedding: there is no second weight to tie."""
        return self.gpt.head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.gpt.head = new_embeddings

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        resized = super().resize_token_embeddings(*args, **kwargs)
        self.gpt.config = self.config.model
        return resized

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        """On each block as an instance: parameters keep their names."""
        self.gradient_checkpointing = enable
        for place, block in enumerate(self.gpt.blocks):
            vars(block).pop("forward", None)
            if enable and place % every_n_layers == 0:
                block.forward = functools.partial(gradient_checkpointing_func, block.forward)

    def prepare_inputs_for_generation(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        attends, given = self.config.model.attends, kwargs.pop("prefix_lengths", None)
        if attends == "bidirectional":
            raise BadInput("a bidirectional model sees the tokens to come: it cannot make them one after the other")
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)
        cache = inputs.get("cache")
        if attends == "prefix" and (cache is None or int(cache.get_seq_length()) == 0):
            if given is None and cache is None:
                raise BadInput("use_cache = False: give prefix_lengths, as the text's own length grows")
            whole = torch.full((len(input_ids),), inputs["input_ids"].shape[1], device=input_ids.device)
            inputs["prefix_lengths"] = whole if given is None else given
        return inputs

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        """The mask as it is: the model makes its own, of what it knows about padding."""
        return attention_mask

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: `generate_batch`, `cache_implementation="paged"`, and servers that batch so come through here."""
        raise BadInput(
            "continuous batching keeps keys and values in pages that transformers' attention functions read, and this "
            "model has an attention of its own: use generate, whose batches are padded"
        )

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        """Never by itself: how many tokens a cache holds is a number here, and each would be compiled for."""
        return False


# ------------------------------------------------------------------------------------------------------------ attention


def attend_as(
    config: QurveConfig,
    q_BHTE: Tensor,
    k_BGSE: Tensor,
    v_BGSE: Tensor,
    *,
    mask: tuple[Tensor | None, bool],
    scale: float,
    dropout: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """`qurve.model.attention.attend`, in the way that `attn_implementation` names."""
    way, given = config._attn_implementation, {"mask": mask, "scale": scale, "dropout": dropout, "softcap": softcap}
    if way == "eager":
        return written_out(q_BHTE, k_BGSE, v_BGSE, **given)  # type: ignore[arg-type]
    if way != "flex_attention":
        return attend(q_BHTE, k_BGSE, v_BGSE, **given)  # type: ignore[arg-type]
    from transformers.integrations.flex_attention import flex_attention_forward

    module = nn.Module().train(torch.is_grad_enabled())  # which is asked for nothing else
    y_BTHE, _ = flex_attention_forward(
        module, q_BHTE, k_BGSE, v_BGSE, _block_mask(mask, q_BHTE, k_BGSE), scale, softcap, dropout=dropout
    )
    y_BHTE: Tensor = y_BTHE.transpose(1, 2)
    return y_BHTE


def _block_mask(mask: tuple[Tensor | None, bool], q_BHTE: Tensor, k_BGSE: Tensor) -> Any:
    """The mask as `View.mask` gives it in flex attention's form; None where everything is visible."""
    from torch.nn.attention.flex_attention import create_block_mask

    visible, is_causal = mask
    queries, keys = q_BHTE.shape[2], k_BGSE.shape[2]
    if is_causal:
        return _causal_block_mask(queries, q_BHTE.device)
    if visible is None:
        return None
    several = visible.shape[0] > 1

    def at(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return visible[b if several else 0, 0, q, k]

    return create_block_mask(at, visible.shape[0] if several else None, None, queries, keys, device=visible.device)


@functools.lru_cache(maxsize=16)
def _causal_block_mask(length: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device=device)


# ---------------------------------------------------------------------------------------------------------------- masks


def _limits(
    mask: Tensor | None, positions: Tensor | None, ids_BT: Tensor, start: int, cached: bool, attends: str
) -> dict[str, Tensor]:
    """What `GPT.hidden` is told of their mask: `padding_B`, `allowed_BTT`. Raises `BadInput` for what it cannot be."""
    (batch, length), limits = ids_BT.shape, {}
    expected_BT = torch.arange(start, start + length, device=ids_BT.device)[None]
    real_BT = None
    if mask is not None and mask.dim() == 4:
        if cached or mask.shape[1] != 1:
            raise BadInput("a mask [B, 1, T, T] is for a call without a cache, and for all heads alike")
        if mask.dtype != torch.bool and (mask > 0).any():
            raise BadInput("a mask [B, 1, T, T] that is not of bools is added to the logits: 0 where a token is seen")
        limits["allowed_BTT"] = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0
    elif mask is not None:
        if mask.shape != (batch, start + length):
            raise BadInput(
                f"attention_mask has the shape {list(mask.shape)}; {batch} sequences of {start} tokens in the cache "
                f"and {length} new ones need [{batch}, {start + length}]"
            )
        real_BS = mask.to(ids_BT.device).bool()
        if not real_BS.all():
            padding_B = (real_BS.cumsum(-1) == 0).sum(-1)
            at_end_B = (real_BS.flip(-1).cumsum(-1) == 0).sum(-1) % (start + length)  # none where all is padding
            if (padding_B + real_BS.sum(-1) + at_end_B != start + length).any():
                raise BadInput("attention_mask has padding between real tokens; pad at the left (or at the right)")
            if start and at_end_B.any():
                raise BadInput("attention_mask has padding at the right, and goes on from a cache; pad at the left")
            if padding_B.any():
                limits["padding_B"] = padding_B
                expected_BT = (expected_BT - padding_B[:, None]).clamp(min=0)
            if at_end_B.any() and attends == "bidirectional":  # nobody looks there otherwise
                limits["allowed_BTT"] = real_BS[:, None, :].expand(-1, length, -1)
            real_BT = real_BS[:, start:]
    if positions is not None:
        fits = positions.shape[-1] == length
        right = positions.to(ids_BT.device) == expected_BT if fits else torch.tensor(False)
        if not fits or not (right if real_BT is None else right | ~real_BT).all():
            raise BadInput(
                "position_ids are not those that this model counts, from each sequence's first real token on; leave "
                "them out (several texts in one row are not told apart)"
            )
    return limits


def _some(keys: list[str], most: int = 4) -> str:
    return ", ".join(keys[:most]) + (f" and {len(keys) - most} more" if len(keys) > most else "")


AutoConfig.register(QurveConfig.model_type, QurveConfig, exist_ok=True)
AutoModelForCausalLM.register(QurveConfig, QurveForCausalLM, exist_ok=True)
