"""The arms of `qurve compare zoo`: one model of each kind, with a sentence on what it is and where it comes from.

Every arm is the small baseline with some fields changed. A new kind takes one entry in `ZOO`, and one line in
`CONTROLLED` where it has more parameters than what it replaces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from qurve import accounting
from qurve.model.config import ModelConfig, Subspaces
from qurve.model.residual import Skip
from qurve.projections import Bottleneck, Identity, MLPReuse, Residual


class Entry(NamedTuple):
    """One arm."""

    label: str
    sentence: str
    changes: dict[str, Any]
    """Fields of `ModelConfig`, other than the small baseline's."""


ANCHORED = Bottleneck(anchor="linear")
"""For keys and values: their weights are kept, and the nonlinear part is added to what they give."""
BARE = Skip(norms="none", attention=False, mlp=False)

ZOO: dict[str, dict[str, Entry]] = {
    "Queries": {
        "baseline": Entry("Baseline", "Linear queries in a GPT-2 block with pre-norms.", {}),
        "identity": Entry(
            "W_Q = I",
            "No query weight: the block's normalised input is its own query (arXiv 2510.23912).",
            {"query": Identity()},
        ),
        "residual": Entry("Linear residual", "`(x + x W) / 2`: anchored, and linear.", {"query": Residual()}),
        "res-gelu": Entry(
            "Res. GELU",
            "The paper's layer, `(x + LN(GELU(RMSNorm(x) W1) W2)) / 2` with R = D / 2 (arXiv 2603.13381).",
            {"query": Bottleneck()},
        ),
        "res-relu": Entry("Res. ReLU", "ReLU in place of GELU.", {"query": Bottleneck(activation="relu")}),
        "res-relu2": Entry(
            "Res. ReLU²", "Squared ReLU, as in Primer (arXiv 2109.08668).", {"query": Bottleneck(activation="relu2")}
        ),
        "res-silu": Entry("Res. SiLU", "SiLU in place of GELU.", {"query": Bottleneck(activation="silu")}),
        "res-gelu-bare": Entry(
            "Res. GELU, no norms",
            "Neither the norm before `W1` nor the one after `W2`.",
            {"query": Bottleneck(pre_norm="none", post_norm="none")},
        ),
        "res-gelu-quarter": Entry(
            "Res. GELU, R = D / 4", "Half as wide a bottleneck.", {"query": Bottleneck(width=32)}
        ),
        "res-gelu-full": Entry("Res. GELU, R = D", "Twice as wide a bottleneck.", {"query": Bottleneck(width=128)}),
        "res-gelu-anchored": Entry(
            "Res. GELU, linear anchor",
            "`(x W_Q + f(x)) / 2`: the form that a pretrained query weight can be taken over into.",
            {"query": ANCHORED},
        ),
        "res-gelu-no-anchor": Entry(
            "Res. GELU, no anchor", "`f(x) / 2`: the bottleneck alone.", {"query": Bottleneck(anchor="none")}
        ),
        "qk-norm": Entry(
            "QK-norm",
            "RMSNorm over each head's queries and keys: the control for higher rates (after arXiv 2010.04245).",
            {"qk_norm": True},
        ),
    },
    "Keys and values": {
        "key": Entry("Nonlinear K", "`(x W_K + f(x)) / 2`, with linear queries.", {"key": ANCHORED}),
        "value": Entry("Nonlinear V", "`(x W_V + f(x)) / 2`, with linear queries.", {"value": ANCHORED}),
        "all-three": Entry(
            "Nonlinear Q, K and V",
            "The paper's layer for queries, `(x W + f(x)) / 2` for keys and values.",
            {"query": Bottleneck(), "key": ANCHORED, "value": ANCHORED},
        ),
        "key-no-anchor": Entry("K, no anchor", "`f(x) / 2` as keys.", {"key": Bottleneck(anchor="none")}),
        "value-no-anchor": Entry("V, no anchor", "`f(x) / 2` as values.", {"value": Bottleneck(anchor="none")}),
        "key-identity": Entry(
            "Q and K, identity anchors",
            "The paper's layer for both, which leaves a term `X Xᵀ` without weights in the attention's logits.",
            {"query": Bottleneck(), "key": Bottleneck()},
        ),
        "value-identity": Entry("V, identity anchor", "The paper's layer as values.", {"value": Bottleneck()}),
    },
    "Output projection": {
        "output": Entry(
            "Nonlinear W_O", "The paper's layer from the heads' outputs to the stream.", {"output": Bottleneck()}
        ),
        "bare": Entry(
            "No skips, no norms",
            "Nothing is skipped over or normalised, and attention starts as the identity (arXiv 2311.01906).",
            {"residual": BARE},
        ),
        "bare-output": Entry(
            "No skips, no norms, nonlinear W_O",
            "The paper's layer as W_O in that topology, for which the paper argues.",
            {"residual": BARE, "output": Bottleneck()},
        ),
    },
    "What the feed-forward has computed": {
        "mlp-reuse": Entry(
            "MLP reuse",
            "`(x + h W) / 2` with all hidden activations `h` of the previous block (arXiv 2603.13381, appendix B.1).",
            {"query": MLPReuse()},
        ),
        "mlp-reuse-sliced": Entry(
            "MLP reuse, sliced",
            "`(x + h[0:D] W) / 2`: as many parameters as a linear query has.",
            {"query": MLPReuse(sliced=True)},
        ),
        "subspaces": Entry(
            "Concept subspaces",
            "Channels of each feed-forward, 16 for each pathway and pair, that skip the stream to the next block's "
            "queries, keys and values (arXiv 2603.13381, appendix B.1).",
            {"subspaces": Subspaces(q=16, k=16, v=16, qk=16, qv=16, kv=16)},
        ),
    },
    "Residual schemes": {
        "post-norm": Entry(
            "Post-norm",
            "Norms after each sum, as in the first transformer (arXiv 1706.03762).",
            {"residual": Skip("post")},
        ),
        "attention-skip": Entry(
            "Attention skip only", "The feed-forward is not skipped over.", {"residual": Skip(mlp=False)}
        ),
        "mlp-skip": Entry(
            "MLP skip only",
            "Attention is not skipped over, and starts as the identity.",
            {"residual": Skip(attention=False)},
        ),
    },
}
"""By what they change; the first is the baseline."""

CONTROLLED = ("key", "all-three", "mlp-reuse", "subspaces")
"""Arms with more parameters than the baseline. Each has a control, `NAME-mlp`: the baseline with so much wider a
feed-forward. Other arms of the same size have it as theirs."""


def arms(baseline: ModelConfig) -> Iterator[tuple[str, str, Entry, ModelConfig]]:
    """Group, name, entry and model of every arm, each control after its arm."""
    for group, entries in ZOO.items():
        for name, entry in entries.items():
            model = dataclasses.replace(baseline, **entry.changes)
            yield group, name, entry, model
            if name in CONTROLLED:
                control = widened(model, baseline)
                label = f"MLP of {control.d_ff}"
                sentence = f"The baseline with a wider feed-forward: as many parameters as *{entry.label}*."
                yield group, f"{name}-mlp", Entry(label, sentence, {"d_ff": control.d_ff}), control


def widened(arm: ModelConfig, baseline: ModelConfig) -> ModelConfig:
    """The baseline with the feed-forward that makes it as large as `arm`, as nearly as whole units can."""
    one_more = dataclasses.replace(baseline, d_ff=baseline.d_ff + 1)
    arm_size, size, next_size = (accounting.count(model).non_embedding for model in (arm, baseline, one_more))
    return dataclasses.replace(baseline, d_ff=baseline.d_ff + round((arm_size - size) / (next_size - size)))
