"""Write `docs/refusals.md`: what a model's configuration refuses, with the message itself; `--check` only compares.

    python tools/refusals.py [--check]

`REFUSALS` is the list. A test holds it against the code: every refusal in there has a row here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from qurve import presets
from qurve.config import apply_settings
from qurve.errors import BadInput
from qurve.model.cache import Cache
from qurve.model.gpt import GPT

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "refusals.md"
BASE = "small/baseline"

REFUSALS: dict[str, list[tuple[str, ...]]] = {
    "Combinations that cannot be": [
        ("model.d_model=130",),
        ("model.n_kv_heads=3",),
        ("model.d_head=33", "model.positions=rope"),
        ("model.d_head=64", "model.query=identity"),
        ("model.d_head=64", "model.query=residual"),
        ("model.d_head=64", "model.query=bottleneck"),
        ("model.d_head=64", "model.query=mlp_reuse"),
        ("model.n_kv_heads=2", "model.key=bottleneck"),
        ("model.n_kv_heads=2", "model.value=identity"),
        ("model.d_head=64", "model.output=bottleneck"),
        ("model.subspaces.q=16", "model.query=bottleneck"),
        ("model.mlp=moe", "model.query=mlp_reuse"),
        ("model.mlp=moe", "model.subspaces.q=16"),
        ("model.d_ff=64", 'model.query={"kind":"mlp_reuse","sliced":true}'),
        ("model.output=mlp_reuse",),
        ("model.share_blocks=true", "model.query=mlp_reuse"),
        ("model.share_blocks=true", "model.subspaces.qk=16"),
        ("model.share_blocks=true", 'model.overrides=[{"layers":[1],"query":{"kind":"bottleneck"}}]'),
        ("model.n_heads=1", "model.d_model=1", "model.query=bottleneck"),
        ("model.query=gated",),
        ('model.query={"kind":"mlp_reuse","first":{"kind":"mlp_reuse"}}',),
        ("model.mixer=linear_attention", "model.window=16"),
        ("train.objective=prefix", "model.attends=prefix", "model.mixer=linear_attention"),
        ("model.mixer=linear_attention", "model.attention_softcap=30"),
        ("model.mixer=linear_attention", 'model.residual={"kind":"skip","attention":false}'),
        ("model.mixer=mlp_attention", "model.query=bottleneck"),
        ("model.mixer=mlp_attention", "model.qk_norm=true"),
        ("model.mixer=mlp_attention", "model.positions=rope"),
        ("model.mixer=mlp_attention", "model.attention_scale=1"),
        ("model.mixer=mlp_attention", "model.subspaces.qk=16"),
        ("model.mixer=mlp_attention", 'model.residual={"kind":"hyper","pathways":true}'),
        ("model.mlp=gated", 'model.residual={"kind":"skip","norms":"none","mlp":false}'),
        ('model.query={"kind":"bottleneck","start":"exact","anchor":"none"}',),
        ('model.query={"kind":"bottleneck","start":"exact","post_norm":"none"}',),
        ('model.query={"kind":"bottleneck","start":"exact","norm_stage":"separate"}',),
    ],
    "Values that cannot be": [
        ("model.d_ff=0",),
        ("model.dropout=1",),
        ("model.norm_eps=0",),
        ("model.attention_softcap=0",),
        ("model.logit_softcap=-30",),
        ("model.subspaces.kv=-1",),
        ('model.overrides=[{"layers":[4],"window":16}]',),
        ('model.overrides=[{"layers":[0],"window":0}]',),
        ('model.overrides=[{"layers":[0]}]',),
        ('model.overrides=[{"layers":[],"window":16}]',),
        ('model.query={"kind":"bottleneck","width":0}',),
        ('model.query={"kind":"bottleneck","eps":0}',),
        ('model.query={"kind":"nonlinear_lora","rank":0}',),
        ('model.mixer={"kind":"mlp_attention","hidden":0}',),
        ('model.mixer={"kind":"primer","width":0}',),
        ('model.residual={"kind":"hyper","streams":1}',),
        ('model.mlp={"kind":"moe","experts":4,"active":5}',),
        ('model.mlp={"kind":"moe","balance":-0.1}',),
        ('model.positions={"kind":"rope","theta":0}',),
        ('model.positions={"kind":"rope","low_frequency_factor":4,"high_frequency_factor":1}',),
    ],
}

CALLS: dict[str, Callable[[], object]] = {
    "more tokens than `model.context`": lambda: built()(tokens(129)),
    "decoding, where `model.attends=bidirectional`": lambda: Cache(
        built("model.attends=bidirectional", "train.objective=mlm").config, 1
    ),
    "`prefix_B` to a causal model": lambda: built()(tokens(8), prefix_B=torch.tensor([3])),
    "no `prefix_B`, where `model.attends=prefix`": lambda: built("model.attends=prefix", "train.objective=prefix")(
        tokens(8)
    ),
    "`padding_B` beside a cache": lambda: built()(tokens(8), Cache(built().config, 1), padding_B=torch.tensor([3])),
    "`padding_B` of another batch": lambda: Cache(built().config, 2, padding_B=torch.tensor([3])),
    "`allowed_BTT` beside a cache": lambda: built()(
        tokens(8), Cache(built().config, 1), allowed_BTT=torch.ones(1, 8, 8, dtype=torch.bool)
    ),
}
"""What a model, once it is made, refuses to be called with."""

HEAD = f"""\
# What cannot be

Every part of a model can be combined with every other, save what stands here. It is refused when the configuration is
made, whether that is done in Python, from JSON or by `--set`, with the message that is shown. The settings are those of
`{BASE}` with these changes.
"""


def refusal(settings: tuple[str, ...]) -> BadInput:
    """What the settings, applied one after the other, end in. All but the last have to be fine."""
    *before, last = settings
    config = apply_settings(presets.get(BASE), before)
    try:
        apply_settings(config, [last])
    except BadInput as error:
        return error
    raise AssertionError(f"{' '.join(settings)} is not refused")


def message(settings: tuple[str, ...]) -> str:
    return re.sub(r"^--set \S+?: ", "", str(refusal(settings)))


def built(*settings: str) -> GPT:
    with torch.device("meta"):
        return GPT(apply_settings(presets.get(BASE), settings).model)


def tokens(length: int) -> torch.Tensor:
    return torch.zeros(1, length, dtype=torch.long, device="meta")


def call_message(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("the call is not refused")


def page() -> str:
    parts = [HEAD]
    for title, rows in REFUSALS.items():
        parts += [f"## {title}", "", "| settings | the message |", "|---|---|"]
        parts += [f"| {'<br>'.join(f'`{setting}`' for setting in row)} | {message(row)} |" for row in rows]
        parts.append("")
    parts += ["## Calls that cannot be", "", "| call | the message |", "|---|---|"]
    parts += [f"| {words} | {call_message(call)} |" for words, call in CALLS.items()]
    parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    text = page()
    if "--check" not in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        sys.exit("docs/refusals.md does not say what the code says; run: python tools/refusals.py")
