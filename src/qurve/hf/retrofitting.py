"""A pretrained model's queries made nonlinear, in place and reversibly.

    Q(x) = x W_Q + scale * f(x)        f(x) = LN(GELU(RMSNorm(x) W1) W2)

`W_Q` stays where it is. At the exact start `f` is zero, so that the model is the same function until it is trained.
Keys, values and the attention function are left alone. Source: arXiv 2603.13381, section 5.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from qurve.errors import BadInput
from qurve.hf.families import Site, bare, find
from qurve.hf.part import NAME, attach, build, detach, parts
from qurve.projections import functional as F
from qurve.projections.bottleneck import Anchor, Bottleneck

RECORD = "qurve_retrofit"
PROBE = (2, 16)
"""Texts and tokens of the probe batch."""


@dataclass(frozen=True)
class Record:
    """What a retrofitted model carries with it: its configuration, and which parameters could be trained before."""

    config: Bottleneck
    trainable: frozenset[str] | None
    """None where nothing was frozen."""


@dataclass(frozen=True)
class Report:
    """What `retrofit` did."""

    config: Bottleneck
    names: tuple[str, ...]
    """The layers that give queries, by their path in the model."""
    added: int
    """Parameters that are new."""
    trainable: int
    """Parameters that can be trained now, of all."""
    total: int
    """Parameters of the model, the new ones among them."""
    logit_change: float | None
    """The largest absolute change of a logit on the probe batch; None where there was no batch."""

    def __str__(self) -> str:
        change = "not measured: give a probe batch" if self.logit_change is None else f"{self.logit_change:.3g}"
        return "\n".join(
            [
                f"{len(self.names)} query layers made nonlinear: {self.names[0]}"
                + (f" … {self.names[-1]}" if len(self.names) > 1 else ""),
                f"{self.added:,} parameters added ({self.added / self.total:.2%} of {self.total:,}); "
                f"{self.trainable:,} can be trained",
                f"largest change of a logit: {change}",
            ]
        )


def retrofit(
    model: nn.Module,
    config: Bottleneck | Literal["bottleneck"] = "bottleneck",
    layers: Literal["all"] | Sequence[int] = "all",
    anchor: Anchor = "linear",
    exact_start: bool = True,
    freeze: bool = True,
    *,
    path: str | None = None,
    seed: int = 0,
    probe: Mapping[str, Any] | None = None,
) -> Report:
    """Make the queries of a pretrained model nonlinear, in this instance alone. `restore` takes it back.

        report = retrofit(model, Bottleneck(width=16), layers=[10, 11])

    `config` gives `f` (its `anchor` and `start` are this call's); `layers` are numbers as they stand in the layers'
    paths. With the anchor `linear` `f` is added to the pretrained queries; `identity` and `none` put `scale * (x + f)`
    or `scale * f` in their place, which is another model and so wants `exact_start=False`. `freeze` leaves nothing but
    the new parameters to be trained; `False` changes no parameter's state. `path` names the query layers of a model
    that `FAMILIES` does not know, `*` standing for one name.

    The new matrices are drawn from `seed` and the layers' names. The model's logits (last hidden states, where it has
    none) are compared on `probe`, arguments of its forward; without one, on random tokens or pixels.

    Raises `BadInput`, with nothing changed, where no query layer is found, for a model retrofitted already, and for
    widths or options that cannot be.
    """
    chosen = _config(config, anchor, exact_start)
    if isinstance(model, DistributedDataParallel):
        raise BadInput(
            "DistributedDataParallel knows the parameters that it was made with alone: retrofit the model, then wrap it"
        )
    if isinstance(model, nn.Module) and (there := parts(model)):
        raise BadInput(
            f"{type(model).__name__} is retrofitted already ({len(there)} layers, {next(iter(there))} first); "
            "qurve.hf.restore(model) takes it back"
        )
    return install(model, chosen, find(model, layers, path), freeze, seed, probe)


def install(
    model: nn.Module, config: Bottleneck, sites: list[Site], freeze: bool, seed: int, probe: Mapping[str, Any] | None
) -> Report:
    """Put parts into these layers: `retrofit`, when all is decided."""
    for site in sites:
        if hasattr(site.layer, NAME):
            raise BadInput(f"{site.name} has something called {NAME!r} already")
    new = [build(site, config) for site in sites]
    for site, part in zip(sites, new, strict=True):
        part.draw(seed, f"{bare(site.name)}.{NAME}")
        part.train(site.layer.training)
    probe, before = compared(model, probe)
    trainable = frozenset(name for name, p in model.named_parameters() if p.requires_grad) if freeze else None
    if freeze:
        model.requires_grad_(False)
    for site, part in zip(sites, new, strict=True):
        attach(site.layer, part)
    _forget_compiled()
    setattr(model, RECORD, Record(config, trainable))
    try:
        after = logits(model, probe)
    except BaseException:
        restore(model)
        raise
    return Report(
        config,
        tuple(site.name for site in sites),
        sum(p.numel() for part in new for p in part.parameters()),
        sum(p.numel() for p in model.parameters() if p.requires_grad),
        sum(p.numel() for p in model.parameters()),
        change(before, after),
    )


def restore(model: nn.Module) -> None:
    """Take the nonlinear parts away: the original layers, and what could be trained before.

    Nothing of the original was ever written to, so it is there bit for bit, unless it was trained (`freeze=False`).
    Raises `BadInput` for a model that is not retrofitted.
    """
    record = record_of(model)
    for name in parts(model):
        detach(model.get_submodule(name))
    _forget_compiled()
    if record.trainable is not None:
        for name, parameter in model.named_parameters():
            if name in record.trainable:
                parameter.requires_grad_(True)
    delattr(model, RECORD)


def _forget_compiled() -> None:
    """What torch has compiled does not notice that a hook came or went, and would go on as before. It is compiled anew
    at the next call."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def merge(model: nn.Module) -> None:
    """Refused, whatever the model: a nonlinear query is no weight. Raises `BadInput` with the ways out."""
    record_of(model)
    raise BadInput(NO_MERGE)


NO_MERGE = (
    "a nonlinear query cannot be merged into W_Q: f(x) is no linear map of x, so no weight gives the same queries. "
    "Keep it beside the model (qurve.hf.save), fold its gains and scale into its matrices (qurve.hf.fold), or take it "
    "away (qurve.hf.restore)"
)


@torch.no_grad()
def fold(model: nn.Module, probe: Mapping[str, Any] | None = None) -> float | None:
    """Fold the pre-norm's gain into `W1`, and the scale into the post-norm's gain (or into `W2`), for inference.

    Prints and returns the largest absolute change of a logit on the probe batch (None without one): rounding. It can be
    trained on, but is another point to an optimiser. Raises `BadInput` for a model that is not retrofitted.
    """
    record = record_of(model)
    probe, before = compared(model, probe)
    for part in parts(model).values():
        own: Bottleneck = part.config  # type: ignore[assignment]
        if own.pre_norm != "none" and (own.norm_stage == "coupled" or own.anchor == "none"):
            part.w1.copy_(F.wide(part.w1) * F.wide(part.pre_gain))
            part.pre_gain.fill_(1.0)
        if own.anchor == "none" and own.norm_stage == "coupled":
            (part.w2 if own.post_norm == "none" else part.post_gain).mul_(own.scale)
            part.config = dataclasses.replace(own, scale=1.0)
    if record.config.anchor != "identity" and record.config.norm_stage == "coupled":
        setattr(model, RECORD, dataclasses.replace(record, config=dataclasses.replace(record.config, scale=1.0)))
    found = change(before, logits(model, probe))
    print(f"folded; largest change of a logit: {'not measured' if found is None else f'{found:.3g}'}")
    return found


def record_of(model: nn.Module) -> Record:
    """What a retrofitted model carries. Raises `BadInput` for another one."""
    record = getattr(model, RECORD, None)
    if isinstance(record, Record):
        return record
    if isinstance(model, nn.Module) and parts(model):
        raise BadInput(
            f"this {type(model).__name__} belongs to the model that was retrofitted, or holds it; give that one"
        )
    raise BadInput(f"{type(model).__name__} is not retrofitted")


def _config(config: Bottleneck | str, anchor: Anchor, exact_start: bool) -> Bottleneck:
    """The configuration with this call's anchor and start. Raises `BadInput` for what cannot be."""
    if config == "bottleneck":
        config = Bottleneck()
    if not isinstance(config, Bottleneck):
        raise BadInput(f"config = {config!r:.80}: 'bottleneck', or a qurve.projections.Bottleneck")
    if exact_start and anchor != "linear":
        raise BadInput(
            f"anchor = {anchor!r} takes the place of the pretrained queries, which is no exact start; say "
            "exact_start=False, or anchor='linear'"
        )
    if anchor == "linear" and config.norm_stage == "separate":
        raise BadInput("norm_stage = 'separate' norms the pretrained queries too, so nothing can be added beside them")
    try:
        return dataclasses.replace(config, anchor=anchor, start="exact" if exact_start else "usual")
    except BadInput:
        raise
    except ValueError as error:
        raise BadInput(f"{error}, or exact_start=False") from None


# ---------------------------------------------------------------------------------------------------------------- probe


def probe_batch(model: nn.Module) -> dict[str, Tensor] | None:
    """Random tokens or pixels for a model of transformers, always the same; None for any other, or without memory."""
    config, first = getattr(model, "config", None), next(model.parameters(), None)
    if config is None or first is None or first.is_meta or getattr(config, "is_encoder_decoder", False):
        return None
    generator = torch.Generator().manual_seed(0)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    takes, vocabulary = getattr(model, "main_input_name", None), getattr(text, "vocab_size", None)
    if takes == "input_ids" and isinstance(vocabulary, int):
        tokens = min(PROBE[1], getattr(text, "max_position_embeddings", None) or PROBE[1])
        return {"input_ids": torch.randint(vocabulary, (PROBE[0], tokens), generator=generator).to(first.device)}
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", None)
    if takes == "pixel_values" and isinstance(size, int) and isinstance(channels, int):
        pixels = torch.empty(PROBE[0], channels, size, size).normal_(generator=generator)
        return {"pixel_values": pixels.to(first.device, first.dtype)}
    return None


@torch.no_grad()
def logits(model: nn.Module, probe: Mapping[str, Any] | None) -> Tensor | None:
    """Logits, or the last hidden states of a model without a head, in evaluation mode; None without a batch."""
    if probe is None:
        return None
    with _evaluating(model):
        out = model(**probe)
    for name in ("logits", "last_hidden_state"):
        if isinstance(found := getattr(out, name, None), Tensor):
            return found
    found = out if isinstance(out, Tensor) else out[0]
    return found if isinstance(found, Tensor) else None


def compared(model: nn.Module, probe: Mapping[str, Any] | None) -> tuple[Mapping[str, Any] | None, Tensor | None]:
    """The batch to compare on, the caller's or ours, and the logits now; none of ours where the model takes another."""
    if probe is not None:
        return probe, logits(model, probe)
    probe = probe_batch(model)
    try:
        return probe, logits(model, probe)
    except Exception:  # a model of text and pixels, say, that wants both: its errors have no common base
        return None, None


def change(before: Tensor | None, after: Tensor | None) -> float | None:
    """The largest absolute difference."""
    return None if before is None or after is None else (F.wide(after) - F.wide(before)).abs().max().item()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
