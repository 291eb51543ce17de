"""Where the attentions of well-known models keep their query weight, and how to find it in anybody's model.

No `transformers` here: a family is known by the name of its attention's class.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import nn

from qurve.errors import BadInput


@dataclass(frozen=True)
class Place:
    """Where an attention module keeps its query weight."""

    path: str
    """The linear layer's name inside the attention module."""
    holds: Literal["queries", "queries first", "queries first in each head"] = "queries"
    """What the layer's outputs are: queries alone; all queries, then keys and values; or that for each head."""


FAMILIES: dict[str, Place] = {
    "BertCrossAttention": Place("query"),
    "BertSelfAttention": Place("query"),
    "GPT2Attention": Place("c_attn", "queries first"),
    "GPTNeoXAttention": Place("query_key_value", "queries first in each head"),
    "Gemma2Attention": Place("q_proj"),
    "Gemma3Attention": Place("q_proj"),
    "LlamaAttention": Place("q_proj"),
    "MistralAttention": Place("q_proj"),
    "MixtralAttention": Place("q_proj"),
    "Olmo2Attention": Place("q_proj"),
    "Phi3Attention": Place("qkv_proj", "queries first"),
    "PhiAttention": Place("q_proj"),
    "Qwen2Attention": Place("q_proj"),
    "Qwen2MoeAttention": Place("q_proj"),
    "Qwen3Attention": Place("q_proj"),
    "Qwen3MoeAttention": Place("q_proj"),
    "SmolLM3Attention": Place("q_proj"),
    "ViTAttention": Place("q_proj"),
    "ViTSelfAttention": Place("query"),
}
"""By the name of the attention's class, exactly: another class may keep other things under the same name. Yours may be
added: `qurve.hf.FAMILIES["MyAttention"] = qurve.hf.Place("wqkv", "queries first")`."""

CROSSING = {"GPT2Attention": Place("q_attn")}
"""Where it is another layer in cross-attention (`is_cross_attention`): there GPT-2's `c_attn` holds keys and values."""


class Layout(NamedTuple):
    """Which outputs of a layer are queries: the first `width` of each of `groups` parts of `size` entries."""

    groups: int
    width: int
    size: int

    @property
    def queries(self) -> int:
        """Query entries of a token."""
        return self.groups * self.width


class Site(NamedTuple):
    """A linear layer that gives queries."""

    name: str
    layer: nn.Module
    d_in: int
    layout: Layout


def find(model: nn.Module, layers: Literal["all"] | Sequence[int] = "all", path: str | None = None) -> list[Site]:
    """The query layers of `model`, in its own order.

    Those of the families above, or those at `path`, where `*` stands for one name: `"layers.*.attn.wq"`. `layers`
    keeps those whose path has one of these numbers as its last. Raises `BadInput` where nothing is found, saying what
    was looked for, and where a layer is not what it has to be.
    """
    if not isinstance(model, nn.Module):
        raise BadInput(f"a model is retrofitted as a loaded instance, and this is {model!r:.80}")
    places: list[tuple[str, Place | None]]
    if path is None:
        places = [
            (f"{name}.{place.path}".lstrip("."), place)
            for name, module in model.named_modules()
            if (place := _place(module)) is not None
        ]
    else:
        pattern = re.compile(re.escape(path).replace(r"\*", r"[^.]+"))
        places = [(name, None) for name, _ in model.named_modules() if pattern.fullmatch(name)]
    if not places:
        raise BadInput(_nothing(model, path))
    chosen = _chosen([name for name, _ in places], layers)
    return [_site(model, within(model, name), place) for name, place in places if name in chosen]


def _place(attention: nn.Module) -> Place | None:
    """Where a module keeps its query weight, if it is a known attention."""
    name = type(attention).__name__
    return (CROSSING if getattr(attention, "is_cross_attention", False) else {}).get(name) or FAMILIES.get(name)


def site(model: nn.Module, name: str) -> Site:
    """The query layer called `name`. Raises `BadInput` where there is none, or where it holds more than queries."""
    return _site(model, name, None)


def _site(model: nn.Module, name: str, place: Place | None) -> Site:
    parent_name, _, own = bare(name).rpartition(".")
    try:
        attention, layer = model.get_submodule(parent_name), model.get_submodule(name)
    except AttributeError:
        raise BadInput(f"{type(model).__name__} has no layer {name}") from None
    known = _place(attention)
    if place is None and known is not None:
        if known.path != own:
            raise BadInput(f"the queries of {type(attention).__name__} come from {known.path}, not from {own} ({name})")
        place = known
    d_in, d_out = _widths(name, layer)
    return Site(name, layer, d_in, _layout(name, attention, (place or Place(own)).holds, d_in, d_out))


def bare(name: str) -> str:
    """A layer's name without PEFT's wrappers around it."""
    while name.endswith(_WRAPPED):
        name = name.removesuffix(_WRAPPED)
    return name


def within(model: nn.Module, name: str) -> str:
    """The name of the layer itself, where PEFT has wrapped the one called `name`: wrappers go when they are merged."""
    try:
        layer: Any = model.get_submodule(name)
    except AttributeError:
        return name
    while isinstance(layer := getattr(layer, "base_layer", None), nn.Module):
        name += _WRAPPED
    return name


_WRAPPED = ".base_layer"


def _widths(name: str, layer: nn.Module) -> tuple[int, int]:
    """Input and output width; `nx` and `nf` are what transformers' Conv1D calls them."""
    for d_in, d_out in (("in_features", "out_features"), ("nx", "nf")):
        if isinstance(getattr(layer, d_in, None), int) and isinstance(getattr(layer, d_out, None), int):
            return getattr(layer, d_in), getattr(layer, d_out)
    raise BadInput(f"{name} is no linear layer but {type(layer).__name__}: it has no input and output width")


def _layout(name: str, attention: nn.Module, holds: str, d_in: int, d_out: int) -> Layout:
    heads, width = _heads(attention)
    if holds == "queries":
        if d_out != heads * width if heads and width else d_out == 3 * d_in:
            raise BadInput(
                f"{name} has {d_out} outputs, so that it gives more than queries; say which in qurve.hf.FAMILIES"
                f"[{type(attention).__name__!r}]"
            )
        return Layout(1, d_out, d_out)
    if not (heads and width):
        raise BadInput(
            f"{name} gives {holds}, and {type(attention).__name__} does not say how many heads of what width"
        )
    if holds == "queries first" and d_out > heads * width:
        return Layout(1, heads * width, d_out)
    if holds == "queries first in each head" and d_out == 3 * heads * width:
        return Layout(heads, width, 3 * width)
    raise BadInput(f"{name} has {d_out} outputs, which is not {holds} for {heads} heads of {width}")


def _heads(attention: nn.Module) -> tuple[int | None, int | None]:
    """Query heads and their width, where the attention or its configuration tells."""
    owners = (attention, getattr(attention, "config", None))
    heads = _whole(owners, "num_attention_heads", "num_heads")
    return heads, _whole(owners, "head_dim", "head_size", "attention_head_size")


def _whole(owners: Sequence[object], *names: str) -> int | None:
    found = (getattr(owner, name, None) for name in names for owner in owners)
    return next((value for value in found if isinstance(value, int)), None)


def _number(name: str) -> int | None:
    """The last whole number in a path: of the layer, in every family."""
    return next((int(part) for part in reversed(name.split(".")) if part.isdigit()), None)


def _chosen(names: list[str], layers: Any) -> set[str]:
    if layers == "all":
        return set(names)
    is_list = isinstance(layers, Collection) and not isinstance(layers, str)
    if not is_list or not all(isinstance(n, int) and not isinstance(n, bool) for n in layers):
        raise BadInput(f"layers = {layers!r}: 'all', or numbers of layers such as [0, 1]")
    there = {name: _number(name) for name in names}
    missing = sorted(set(layers) - {n for n in there.values() if n is not None})
    if missing or not layers:
        numbers = sorted({n for n in there.values() if n is not None})
        raise BadInput(f"layers = {list(layers)}: {missing or 'nothing'} is not there; there are {_range(numbers)}")
    return {name for name, number in there.items() if number in layers}


def _range(numbers: list[int]) -> str:
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers)) or "no numbered ones"


def _nothing(model: nn.Module, path: str | None) -> str:
    name = type(model).__name__
    if path is not None:
        return (
            f"nothing in {name} is at path = {path!r}; `*` stands for one name, as in 'model.layers.*.self_attn.q_proj'"
        )
    seen = list(_attentions(model))
    there = f"; it has {', '.join(seen[:3])}" if seen else ""
    return (
        f"no query weight found in {name}{there}. Looked for {', '.join(FAMILIES)}. For another model say where: "
        "path='model.layers.*.self_attn.q_proj'"
    )


def _attentions(model: nn.Module) -> Iterator[str]:
    """What looks like an attention, one of each class."""
    classes = set()
    for name, module in model.named_modules():
        kind = type(module).__name__
        if "attention" in kind.lower() and kind not in classes:
            classes.add(kind)
            yield f"{kind} at {name or 'the top'}"
