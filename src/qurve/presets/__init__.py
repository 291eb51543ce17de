"""Named configurations: the paper's arms, theirs at larger sizes, the small ones that `qurve compare` trains, those of
the zoo, and `smoke`.

`paper/*` are the runs of "Beyond Linearity in Attention Projections" (arXiv 2603.13381) and of its repository: learning
rates, floors, decays and widths as published. `PRINTED` holds Table 1's figures as they are printed there.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from functools import cache, partial
from importlib import resources
from typing import Any

from qurve import accounting
from qurve.errors import BadInput, did_you_mean
from qurve.model.config import ModelConfig
from qurve.model.feed_forward import Gated, MixtureOfExperts
from qurve.model.positions import Rope
from qurve.presets import scale, zoo
from qurve.projections import Bottleneck, Identity, Linear, ProjectionConfig, Residual
from qurve.train.config import DataConfig, EvalConfig, RunConfig, TrainConfig

PRINTED: dict[str, dict[str, str]] = {
    arm: dict(
        zip(
            ("delta_params", "weight_decay", "lr", "min_lr", "val_loss", "dll", "dppx"),
            row.split(),
            strict=True,
        )
    )
    for arm, row in {
        "paper/baseline": "ref. 0.10 6e-4 6e-5 2.9441 ref. ref.",
        "paper/mlp-4.75": "+12.5% 0.10 6e-4 6e-5 2.9165 +0.94% +2.72%",
        "paper/mlp-4.75-scaled": "+12.5% 0.10 5.66e-4 5.66e-5 2.9173 +0.91% +2.65%",
        "paper/res-gelu-wd005": "~0.03% 0.05 2.4e-3 3e-5 2.9015 +1.45% +4.17%",
        "paper/res-gelu-4e-3": "~0.03% 0.10 4.0e-3 1e-5 2.8750 +2.35% +6.68%",
        "paper/res-gelu-best": "~0.03% 0.10 3.6e-3 2e-5 2.8736 +2.40% +6.81%",
    }.items()
}
"""Table 1 of the paper, as printed (its validation losses are at step 60,000)."""


def get(name: str) -> RunConfig:
    """The configuration called `name`. Raises `BadInput` with the nearest name when there is none."""
    if name in _PRESETS:
        return _PRESETS[name]()
    if name not in names():
        raise BadInput(f"there is no preset {name!r}{did_you_mean(name, names())}")
    return zoo_runs()[name.removeprefix("zoo/")]


def names() -> list[str]:
    return [*_PRESETS, *(f"zoo/{name}" for name in zoo_runs())]


# ----------------------------------------------------------------------------------------------- the paper's protocol

LINEAR = Linear()
PAPER_EVAL = EvalConfig(every=1_000, windows=2_400, splits=("train", "val"))
PAPER_DATA = DataConfig(corpus="openwebtext", tokenizer="gpt2", order="paper", order_seed=42)


def _paper(
    *,
    d_model: int = 768,
    d_ff: int = 3072,
    query: ProjectionConfig = LINEAR,
    attention_scale: float | None = None,
    tie_embeddings: bool = True,
    **training: Any,
) -> RunConfig:
    """12 layers, 12 heads, context 1024; 60,000 steps of 480 sequences; the cosine reaches its floor at 60,002."""
    model = ModelConfig(
        d_model=d_model, d_ff=d_ff, query=query, attention_scale=attention_scale, tie_embeddings=tie_embeddings
    )
    settings: dict[str, Any] = {"steps": 60_000, "horizon": 60_002, "checkpoint_every": 1_000, **training}
    return RunConfig(model, PAPER_DATA, TrainConfig(**settings), PAPER_EVAL)


def _res_gelu(weight_decay: float, lr: float, min_lr: float) -> RunConfig:
    return _paper(query=Bottleneck(), weight_decay=weight_decay, lr=lr, min_lr=min_lr)


HALVED_SCALE = 1 / (2 * math.sqrt(64))
"""0.0625: with `W_Q = I` the authors keep the layer's one half, in the attention scale."""

_PRESETS: dict[str, Callable[[], RunConfig]] = {
    "paper/baseline": _paper,
    "paper/baseline-wd005": lambda: _paper(weight_decay=0.05),
    "paper/mlp-4.33": lambda: _paper(d_ff=3328),  # 4 1/3 d
    "paper/mlp-4.5": lambda: _paper(d_ff=3456),
    "paper/mlp-4.625": lambda: _paper(d_ff=3552),
    "paper/mlp-4.75": lambda: _paper(d_ff=3648),
    "paper/mlp-4.75-scaled": lambda: _paper(d_ff=3648, lr=6e-4 / math.sqrt(1.125), min_lr=6e-5 / math.sqrt(1.125)),
    "paper/mlp-5": lambda: _paper(d_ff=3840),
    "paper/mlp-3.5": lambda: _paper(d_ff=2688),
    "paper/narrow-744": lambda: _paper(d_model=744, d_ff=2976),
    "paper/wide-816": lambda: _paper(d_model=816, d_ff=3264),
    "paper/identity": lambda: _paper(query=Identity(), attention_scale=HALVED_SCALE),
    "paper/identity-untied": lambda: _paper(
        query=Identity(),
        attention_scale=HALVED_SCALE,
        tie_embeddings=False,
        weight_decay=2**-5,
        steps=600_000,
        horizon=600_000,
        stop_at=105_001,
    ),
    "paper/identity-mlp-4.5": lambda: _paper(query=Identity(), attention_scale=HALVED_SCALE, d_ff=3456),
    "paper/residual": lambda: _paper(query=Residual()),
    "paper/res-gelu-wd005": lambda: _res_gelu(0.05, 2.4e-3, 3e-5),
    "paper/res-gelu-4e-3": lambda: _res_gelu(0.10, 4.0e-3, 1e-5),
    "paper/res-gelu-best": lambda: _res_gelu(0.10, 3.6e-3, 2e-5),
    **{f"scale/{name}": partial(scale.run, name, _paper()) for name in scale.NAMES},
    "small/baseline": lambda: _small("baseline"),
    "small/mlp-4.75": lambda: _small("mlp-4.75"),
    "small/res-gelu": lambda: _small("res-gelu"),
    "modern/llama": lambda: _modern("llama", LINEAR),
    "modern/llama-res-gelu": lambda: _modern("llama", Bottleneck()),
    "modern/qwen3": lambda: _modern("qwen3", LINEAR),
    "modern/qwen3-res-gelu": lambda: _modern("qwen3", Bottleneck(anchor="linear")),  # 4 heads of 64 are not 128 wide
    "modern/qwen3-mlp": lambda: _matched("modern/qwen3-res-gelu", "modern/qwen3"),
    "modern/mixtral": lambda: _modern("mixtral", LINEAR),
    "modern/mixtral-res-gelu": lambda: _modern("mixtral", Bottleneck()),
    "smoke": lambda: _smoke(),
}


# ------------------------------------------------------------------------------------------------- small enough for CPU

SMALL_MODELS: dict[str, ModelConfig] = {
    arm: ModelConfig(n_layers=4, d_model=128, n_heads=4, d_ff=d_ff, context=128, vocab_size=2048, query=query)
    for arm, d_ff, query in (("baseline", 512, LINEAR), ("mlp-4.75", 608, LINEAR), ("res-gelu", 512, Bottleneck()))
}
SMALL_DATA = DataConfig(tokenizer="bpe:2048")
SMALL_TRAIN = TrainConfig(steps=480, tokens_per_step=1024, warmup_steps=24, compile=False)
SMALL_EVAL = EvalConfig(every=80, windows=256)


def small(arm: str, lr: float, min_lr: float) -> RunConfig:
    """The paper's architecture `arm` with about a million parameters, on the embedded corpus."""
    training = dataclasses.replace(SMALL_TRAIN, lr=lr, min_lr=min_lr)
    return RunConfig(SMALL_MODELS[arm], SMALL_DATA, training, SMALL_EVAL)


def _small(arm: str) -> RunConfig:
    chosen = small_search()["chosen"][arm]["point"]
    return small(arm, chosen["train.lr"], chosen["train.min_lr"])


@cache
def small_search() -> dict[str, Any]:
    """The committed evidence of the learning-rate search over the small arms (`experiments/small_search.py`)."""
    text = resources.files("qurve").joinpath("small-search.json").read_text(encoding="utf-8")
    search: dict[str, Any] = json.loads(text)
    return search


_LLAMA = {"n_kv_heads": 2, "norm": "rmsnorm", "mlp": Gated(), "d_ff": 352, "positions": Rope(theta=5e5)}
_MIXTRAL = {"mlp": MixtureOfExperts(experts=8, active=2), "d_ff": 176, "positions": Rope(theta=1e6)}
MODERN_MODELS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "qwen3": _LLAMA | {"d_head": 64, "qk_norm": True, "positions": Rope(theta=1e6)},
    "mixtral": _LLAMA | _MIXTRAL,
}
"""The blocks of Llama 3, Qwen3 and Mixtral at the small size: what differs from the small baseline."""


def _modern(family: str, query: ProjectionConfig) -> RunConfig:
    """A modern block on the embedded corpus. Rate and floor are the small baseline's: no search was made for these."""
    chosen = small_search()["chosen"]["baseline"]["point"]
    baseline = small("baseline", chosen["train.lr"], chosen["train.min_lr"])
    return dataclasses.replace(
        baseline, model=dataclasses.replace(baseline.model, query=query, **MODERN_MODELS[family])
    )


def _matched(arm: str, baseline: str) -> RunConfig:
    """The baseline with a wider feed-forward: as many parameters as the arm."""
    config = get(baseline)
    return dataclasses.replace(config, model=accounting.match("params", get(arm).model, config.model).config)


@cache
def zoo_runs() -> dict[str, RunConfig]:
    """One of each kind, half as long as the small arms. Rate and floor are the small baseline's: no search was made for
    these either."""
    baseline = get("small/baseline")
    baseline = dataclasses.replace(baseline, train=dataclasses.replace(baseline.train, steps=240))
    return {arm.name: dataclasses.replace(baseline, model=arm.model) for arm in zoo.arms(baseline.model)}


def _smoke() -> RunConfig:
    """The paper's layer in a tiny model: under half a minute on two cores, nothing compiled."""
    model = ModelConfig(n_layers=2, d_model=64, n_heads=2, d_ff=256, context=64, vocab_size=320, query=Bottleneck())
    training = TrainConfig(
        steps=200,
        tokens_per_step=2048,
        lr=4e-3,
        min_lr=4e-4,
        warmup_steps=10,
        compile=False,
        precision="float32",
        threads=1,
    )
    return RunConfig(model, DataConfig(tokenizer="bytes"), training, EvalConfig(every=100, windows=64))
