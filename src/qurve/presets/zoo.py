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
from qurve.model.feed_forward import Dense
from qurve.model.residual import Skip
from qurve.projections import Bottleneck, Identity, MLPReuse, Residual
from qurve.zoo.hyper_connections import HyperConnections
from qurve.zoo.linear_attention import LinearAttention
from qurve.zoo.mlp_attention import MLPAttention
from qurve.zoo.primer import Primer
from qurve.zoo.projections import GatedOutput, NonlinearLoRA, mlp_projection


class Entry(NamedTuple):
    """One arm."""

    label: str
    sentence: str
    changes: dict[str, Any]
    """Fields of `ModelConfig`, other than the small baseline's."""


ANCHORED = Bottleneck(anchor="linear")
"""For keys and values: their weights are kept, and the nonlinear part is added to what they give."""
BARE = Skip(norms="none", attention=False, mlp=False)
MLP = mlp_projection(128)

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
        "res-gelu-separate": Entry(
            "Res. GELU, separate norms",
            "`LN((n + GELU(n W1) W2) / 2)` with `n = RMSNorm(x)`: the norms are a stage of their own.",
            {"query": Bottleneck(norm_stage="separate")},
        ),
        "res-gelu-exact": Entry(
            "Res. GELU, linear anchor, exact start",
            "`(x W_Q + f(x)) / 2` whose `f` starts at zero, by the post-norm's gain.",
            {"query": Bottleneck(anchor="linear", start="exact")},
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
    "Other papers' projections": {
        "mlp-qkv": Entry(
            "MLP for Q, K and V",
            "`ReLU(x W1) W2` with `W1: D -> 2 D`, without anchor or norms (arXiv 2310.11398).",
            {"query": MLP, "key": MLP, "value": MLP},
        ),
        "nonlinear-lora": Entry(
            "Nonlinear LoRA on Q and V",
            "`x W + 2 GELU(x A) B` of rank 8, `B` at zero to begin with, nothing frozen (after arXiv 2106.09685).",
            {"query": NonlinearLoRA(), "value": NonlinearLoRA()},
        ),
        "gate": Entry(
            "Sigmoid output gate",
            "`(y * sigmoid(x W_g)) W_O`: the heads' outputs gated by the block's input (arXiv 2505.06708).",
            {"output": GatedOutput()},
        ),
        "gate-res-gelu": Entry(
            "Sigmoid output gate and Res. GELU",
            "Both at once: one acts before the softmax, the other after it.",
            {"output": GatedOutput(), "query": Bottleneck()},
        ),
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
    "Mixers": {
        "primer": Entry(
            "Primer",
            "Convolutions over three tokens after Q, K and V, and squared ReLU in the feed-forward (arXiv 2109.08668).",
            {"mixer": Primer(), "mlp": Dense("relu2")},
        ),
        "primer-res-gelu": Entry(
            "Primer and Res. GELU",
            "The same with the paper's layer for queries.",
            {"mixer": Primer(), "mlp": Dense("relu2"), "query": Bottleneck()},
        ),
        "linear-attention": Entry(
            "Linear attention",
            "`elu + 1` of queries and keys in place of the softmax: decoding at constant size (arXiv 2006.16236).",
            {"mixer": LinearAttention()},
        ),
        "linear-res-gelu": Entry(
            "Linear attention and Res. GELU",
            "The same feature map on the paper's queries.",
            {"mixer": LinearAttention(), "query": Bottleneck()},
        ),
        "mlp-attention": Entry(
            "MLP-attention",
            "No queries or keys: an MLP of each token gives its attention to each position (Morsali et al., 2023); of "
            "hidden width 32, which takes the parameters of W_Q and W_K.",
            {"mixer": MLPAttention(hidden=32)},
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
        "norm-free": Entry("No norms", "Both skips, and no norm anywhere.", {"residual": Skip("none")}),
        "shared": Entry("Shared weights", "One block's weights serve as all four.", {"share_blocks": True}),
        "hyper-static": Entry(
            "Hyper-connections, static",
            "Four streams; learned weights read, write and mix them (arXiv 2409.19606).",
            {"residual": HyperConnections(mode="static")},
        ),
        "hyper-dynamic": Entry(
            "Hyper-connections, dynamic",
            "The weights depend on the token (arXiv 2409.19606).",
            {"residual": HyperConnections()},
        ),
        "hyper-manifold": Entry(
            "Hyper-connections, manifold",
            "The mixing matrix is kept doubly stochastic (arXiv 2512.24880).",
            {"residual": HyperConnections(mode="manifold")},
        ),
        "hyper-pathways": Entry(
            "Hyper-connections, Q, K, V apart",
            "Queries, keys and values, all nonlinear, read the streams with weights of their own; Q and K have "
            "identity anchors: the asymmetry that arXiv 2603.13381 suggests against the term `X Xᵀ`.",
            {
                "residual": HyperConnections(pathways=True),
                "query": Bottleneck(),
                "key": Bottleneck(),
                "value": ANCHORED,
            },
        ),
    },
}
"""By what they change; the first is the baseline."""

CONTROLLED = (
    "key",
    "all-three",
    "gate",
    "mlp-qkv",
    "nonlinear-lora",
    "mlp-reuse",
    "subspaces",
    "primer",
    "hyper-dynamic",
    "hyper-manifold",
    "hyper-pathways",
)
"""Arms with more parameters than the baseline. Each has a control, `NAME-mlp`: the baseline with so much wider a
feed-forward. Other arms of the same size have it as theirs."""


class Member(NamedTuple):
    """An arm with its model. A control says how near it comes to its arm."""

    group: str
    name: str
    label: str
    sentence: str
    model: ModelConfig
    match: accounting.Match | None = None


def arms(baseline: ModelConfig) -> Iterator[Member]:
    """Every arm, each control after its arm."""
    for group, entries in ZOO.items():
        for name, (label, sentence, changes) in entries.items():
            model = dataclasses.replace(baseline, **changes)
            yield Member(group, name, label, sentence, model)
            if name in CONTROLLED:
                control, match = accounting.match("params", model, baseline)
                told = f"The baseline with a wider feed-forward: as many parameters as *{label}*."
                yield Member(group, f"{name}-mlp", f"MLP of {control.d_ff}", told, control, match)
