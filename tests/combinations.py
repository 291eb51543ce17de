"""A covering array of model configurations: every pair of options stands together in at least one of them.

What the model refuses is left out, pair by pair, and `refused_pairs` says which those are. Registered kinds that
`FACTORS` does not know take part with their defaults.
"""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

from qurve.config import Choice
from qurve.model.config import LayerOverride, ModelConfig, Subspaces
from qurve.model.feed_forward import Dense, Gated, MixtureOfExperts
from qurve.model.mixers import MixerConfig
from qurve.model.positions import Learned, NoPositions, Rope
from qurve.model.residual import ResidualConfig, Skip
from qurve.projections import Bottleneck, Identity, Linear, MLPReuse, ProjectionConfig, Residual
from qurve.zoo.hyper_connections import HyperConnections

LENGTH, VOCABULARY = 63, 29
BASE: dict[str, Any] = {"n_layers": 2, "d_model": 60, "d_ff": 70, "context": LENGTH, "vocab_size": VOCABULARY}
Option = dict[str, Any]


def every_kind(base: type[Choice], known: dict[str, Any], skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """The known options and, by their names, the registered kinds that none of them is of."""
    there = {type(option) for option in known.values()}
    rest = {kind: cls() for kind, cls in base.registry.items() if cls not in there and kind not in skip}
    return {**known, **rest}


def one(field: str, options: dict[str, Any]) -> dict[str, Option]:
    return {name: {field: value} for name, value in options.items()}


@functools.cache
def factors() -> dict[str, dict[str, Option]]:
    """The options of each factor by name; each option sets some fields of the model. The first is the usual one."""
    by_place = {
        "query": {k: c for k, c in ProjectionConfig.registry.items() if c.also_reads != "block_input"},
        "output": {k: c for k, c in ProjectionConfig.registry.items() if c.also_reads == "block_input"},
    }
    queries = {
        "linear": Linear(),
        "paper": Bottleneck(width=7),
        "identity": Identity(),
        "residual": Residual(),
        "anchored": Bottleneck("linear", pre_norm="layernorm", activation="relu2"),
        "anchorless": Bottleneck("none", 9, "silu", "none", "rmsnorm"),
        "separate": Bottleneck("linear", norm_stage="separate", pre_norm="none"),
        "mlp_reuse": MLPReuse(),
        "mlp_slice": MLPReuse(sliced=True, first=Bottleneck()),
    }
    known = {type(option) for option in queries.values()}
    queries |= {kind: cls() for kind, cls in by_place["query"].items() if cls not in known}
    anchored = Bottleneck("linear", 11)
    outputs = {"linear": Linear(), "residual": Bottleneck("identity"), "anchored": anchored}
    outputs |= {kind: cls() for kind, cls in by_place["output"].items()}
    override = LayerOverride((1,), query=Linear(), mlp=Gated("gelu"), window=5)
    return {
        "query": one("query", queries),
        "keys-values": {
            "linear": {},
            "both": {"key": anchored, "value": Bottleneck("linear", 5, post_norm="none")},
            "identity-key": {"key": Bottleneck()},
            "anchorless-value": {"value": Bottleneck("none")},
        },
        "output": one("output", outputs),
        "mixer": one("mixer", every_kind(MixerConfig, {})),
        "residual": one(
            "residual",
            every_kind(
                ResidualConfig,
                {
                    "pre": Skip(),
                    "post": Skip("post"),
                    "norm-free": Skip("none"),
                    "skipless": Skip("none", attention=False, mlp=False),
                    "attention-skip": Skip(mlp=False),
                    "mlp-skip": Skip(attention=False),
                    "static": HyperConnections(3, "static"),
                    "manifold": HyperConnections(2, "manifold"),
                    "pathways": HyperConnections(pathways=True),
                },
            ),
        ),
        "positions": one(
            "positions",
            {
                "learned": Learned(),
                "rope": Rope(),
                "rope-interleaved": Rope("interleaved", scaling="llama3"),
                "none": NoPositions(),
            },
        ),
        "heads": {
            "mha": {"n_heads": 3},
            "gqa": {"n_heads": 6, "n_kv_heads": 2},
            "mqa": {"n_heads": 3, "n_kv_heads": 1},
            "wide": {"n_heads": 4, "n_kv_heads": 2, "d_head": 8},
        },
        "mlp": one("mlp", {"dense": Dense(), "relu2": Dense("relu2"), "gated": Gated(), "moe": MixtureOfExperts(3, 2)}),
        "attends": one("attends", {name: name for name in ("causal", "prefix", "bidirectional")}),
        "norm": one("norm", {"layernorm": "layernorm", "rmsnorm": "rmsnorm"}),
        "qk_norm": one("qk_norm", {"plain": False, "qk-norm": True}),
        "window": one("window", {"all": None, "window": 9}),
        "softcap": {"none": {}, "logits": {"logit_softcap": 5.0}, "attention": {"attention_softcap": 5.0}},
        "bias": one("bias", {"no-bias": False, "bias": True}),
        "head": one("tie_embeddings", {"tied": True, "untied": False}),
        "subspaces": one("subspaces", {"none": Subspaces(), "subspaces": Subspaces(q=3, k=2, v=1, qk=4, qv=2, kv=1)}),
        "layers": {
            "alike": {},
            "overrides": {"overrides": (override,)},
            "shared": {"share_blocks": True},
        },
    }


Row = tuple[str, ...]
"""One option's name for each factor, in their order."""


def config_of(row: Row) -> ModelConfig:
    """Raises `ValueError` when the model refuses the row."""
    fields: dict[str, Any] = {}
    for options, name in zip(factors().values(), row, strict=True):
        fields |= options[name]
    return ModelConfig(**BASE, **fields)


@functools.cache
def accepted(row: Row) -> bool:
    try:
        config_of(row)
    except ValueError:
        return False
    return True


Pair = frozenset[tuple[int, str]]


def pairs_of(row: Row) -> set[Pair]:
    return {frozenset(pair) for pair in itertools.combinations(enumerate(row), 2)}


@functools.cache
def covering_array() -> tuple[tuple[Row, ...], frozenset[Pair]]:
    """Rows that hold every pair that some accepted row can hold, and the pairs that none of those tried can."""
    options = [tuple(names) for names in factors().values()]
    usual = tuple(names[0] for names in options)
    open_pairs = {
        frozenset({(i, a), (j, b)})
        for (i, first), (j, second) in itertools.combinations(enumerate(options), 2)
        for a in first
        for b in second
    }
    chance, rows = random.Random(0), [usual]
    open_pairs -= pairs_of(usual)
    refused: set[Pair] = set()
    while open_pairs:
        # Start from an open pair, then fill the other places greedily, one by one, with what is accepted.
        target = min(open_pairs, key=sorted)
        seed = dict(target)
        best: Row | None = None
        for _ in range(3):
            row = list(usual)
            for place, name in seed.items():
                row[place] = name
            if not accepted(tuple(row)):
                break
            places = [place for place in range(len(options)) if place not in seed]
            chance.shuffle(places)
            for place in places:
                fixed = [p for p in range(len(options)) if p in seed or row[p] != usual[p]]
                gains = []
                for name in options[place]:
                    candidate = [*row[:place], name, *row[place + 1 :]]
                    gain = sum(frozenset({(place, name), (p, candidate[p])}) in open_pairs for p in fixed)
                    gains.append((gain, chance.random(), candidate))
                for gain, _, candidate in sorted(gains, reverse=True):
                    if gain and accepted(tuple(candidate)):
                        row = candidate
                        break
            if best is None or len(pairs_of(tuple(row)) & open_pairs) > len(pairs_of(best) & open_pairs):
                best = tuple(row)
        if best is None:
            refused.add(target)
            open_pairs.discard(target)
        else:
            rows.append(best)
            open_pairs -= pairs_of(best)
    return tuple(rows), frozenset(refused)


def words(row: Row) -> str:
    """A readable test id: what is unusual in the row."""
    usual = [next(iter(names)) for names in factors().values()]
    return ",".join(name for name, common in zip(row, usual, strict=True) if name != common) or "usual"
