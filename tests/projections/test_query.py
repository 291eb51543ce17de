"""`NonlinearQuery`: the paper's formula, and a module that behaves as anybody's."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import qurve
from qurve import GPT, NonlinearQuery
from qurve.model.config import ModelConfig

D = 12


def stirred(layer: NonlinearQuery) -> NonlinearQuery:
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.5 * torch.randn_like(p))
    return layer


def test_is_the_papers_formula() -> None:
    """Q(x) = (x + f(x)) / 2 with f(x) = LN(GELU(RMSNorm(x) W1) W2), eps 1e-5, exact GELU."""
    layer = stirred(NonlinearQuery(D, dtype=torch.float64))
    x = torch.randn(2, 7, D, dtype=torch.float64) * torch.tensor([1.0, 1e-2])[:, None, None]  # small rows: eps shows
    rms = torch.sqrt((x**2).sum(-1, keepdim=True) / D + 1e-5)
    a = (layer.pre_gain * x / rms) @ layer.w1.T
    b = 0.5 * a * (1 + torch.erf(a / 2**0.5)) @ layer.w2.T
    mean = b.sum(-1, keepdim=True) / D
    variance = ((b - mean) ** 2).sum(-1, keepdim=True) / D
    f = layer.post_gain * (b - mean) / torch.sqrt(variance + 1e-5)
    assert_close(layer(x), (x + f) / 2, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("d_model", [2, 12, 768])
def test_parameters(d_model: int) -> None:
    layer = NonlinearQuery(d_model)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "w1": (d_model // 2, d_model),
        "w2": (d_model, d_model // 2),
        "pre_gain": (d_model,),
        "post_gain": (d_model,),
    }
    assert sum(p.numel() for p in layer.parameters()) == d_model**2 + 2 * d_model
    assert not list(layer.buffers())


def test_start() -> None:
    layer = NonlinearQuery(256)
    for matrix in (layer.w1, layer.w2):
        assert matrix.std().item() == pytest.approx(0.02, rel=0.03)
        assert abs(matrix.mean().item()) < 5e-4
    assert torch.equal(layer.pre_gain, torch.ones(256))
    assert torch.equal(layer.post_gain, torch.ones(256))
    assert not torch.equal(layer.w1, layer.w2.T)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtype(dtype: torch.dtype) -> None:
    layer = NonlinearQuery(D, dtype=dtype)
    assert {p.dtype for p in layer.parameters()} == {dtype}
    y_BTD = layer(torch.randn(2, 7, D, dtype=dtype))
    assert (y_BTD.dtype, y_BTD.shape) == (dtype, (2, 7, D))


def test_device() -> None:
    layer = NonlinearQuery(4096, device="meta")
    assert {p.device.type for p in layer.parameters()} == {"meta"}
    assert layer(torch.empty(2, 7, 4096, device="meta")).shape == (2, 7, 4096)
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert layer.w1.std().item() == pytest.approx(0.02, rel=0.01)


def test_options_reach_the_layer() -> None:
    layer = NonlinearQuery(
        D,
        20,
        width=5,
        anchor="linear",
        activation="silu",
        pre_norm="layernorm",
        post_norm="rmsnorm",
        eps=1e-3,
        scale=0.7,
        start="exact",
        bias=True,
    )
    expected = qurve.projections.Bottleneck("linear", 5, "silu", "layernorm", "rmsnorm", 1e-3, 0.7, start="exact")
    assert NonlinearQuery(D, norm_stage="separate").config.norm_stage == "separate"
    assert (layer.config, layer.dims) == (expected, (D, 20, True, 0))
    assert layer.w2.shape == (20, 5)


def test_widths_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="use anchor 'linear' or 'none'"):
        NonlinearQuery(D, 20)
    with pytest.raises(ValueError, match="give its width"):
        NonlinearQuery(1)
    with pytest.raises(ValueError, match="at least one unit"):
        NonlinearQuery(D, width=0)
    with pytest.raises(ValueError, match="at least 1"):
        NonlinearQuery(0, width=3)
    with pytest.raises(ValueError, match="above zero"):
        NonlinearQuery(D, eps=0.0)


class Foreign(nn.Module):
    """Somebody's own attention, with the layer in a query weight's place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.query, self.key = NonlinearQuery(D), nn.Linear(D, D)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = self.norm(x_BTD)
        return self.query(x_BTD) @ self.key(x_BTD).transpose(1, 2)


def test_learns_in_a_foreign_model() -> None:
    model, x_BTD = Foreign(), torch.randn(2, 7, D)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(x_BTD).square().mean()
        loss.backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.query.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_copies_and_files() -> None:
    layer, x_BTD = stirred(NonlinearQuery(D)), torch.randn(2, 7, D)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    loaded = NonlinearQuery(D)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    copied = copy.deepcopy(layer)
    for other in (loaded, copied, pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x_BTD), layer(x_BTD))
        assert type(other) is NonlinearQuery
    with torch.no_grad():
        copied.w1.zero_()
    assert not torch.equal(copied(x_BTD), layer(x_BTD))


def test_compiles_without_a_graph_break() -> None:
    layer, x_BTD = stirred(NonlinearQuery(D)), torch.randn(2, 7, D)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert_close(compiled(x_BTD), layer(x_BTD))
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(x_BTD).dtype == torch.bfloat16


def test_names_itself() -> None:
    assert "12 -> 12" in repr(NonlinearQuery(D))
    assert "anchor='identity'" in repr(NonlinearQuery(D))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"activation": "gleu"}, "activation = 'gleu' is not one of its values; did you mean 'gelu'"),
        ({"pre_norm": "rms"}, "pre_norm = 'rms'"),
        ({"post_norm": None}, "post_norm = None"),
        ({"anchor": "foo"}, "anchor = 'foo'"),
        ({"scale": "half"}, "scale = 'half' is not a finite number"),
        ({"width": 2.5}, "width = 2.5"),
        ({"norm_stage": "apart"}, "norm_stage = 'apart'"),
        ({"start": "exact", "post_norm": "none"}, "post_norm = 'none' has none; use 'layernorm' or 'rmsnorm'"),
        ({"start": "exact", "anchor": "none"}, "anchor = 'none' has none; use 'linear'"),
        ({"start": "exact", "norm_stage": "separate"}, "spans the anchor too"),
    ],
)
def test_a_misspelt_option_is_refused_and_never_another_function(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        NonlinearQuery(8, **options)


@pytest.mark.parametrize("d_model", ["64", 64.0, 0, None])
def test_a_width_that_is_no_number_is_refused(d_model: Any) -> None:
    with pytest.raises(ValueError, match="input width"):
        NonlinearQuery(d_model)


def test_an_input_of_another_width_is_refused_by_its_width() -> None:
    with pytest.raises(ValueError, match="takes 8 channels, and the input has 6"):
        NonlinearQuery(8)(torch.ones(2, 3, 6))


# ------------------------------------------------------------------------------------------------- a pretrained weight


@pytest.mark.parametrize("scale", [0.5, 1.0, 0.3])
@pytest.mark.parametrize("bias", [False, True])
def test_takes_over_a_pretrained_weight(bias: bool, scale: float) -> None:
    linear, x_BTD = nn.Linear(D, 20, bias=bias), torch.randn(2, 7, D)
    query = NonlinearQuery.from_linear(linear, scale=scale, width=5)
    assert_close(query(x_BTD), linear(x_BTD), atol=1e-6, rtol=1e-6)
    assert (query.config.anchor, query.config.start, query.config.width) == ("linear", "exact", 5)
    assert query.dims == (D, 20, bias, 0)
    assert query.w2.any()
    with torch.no_grad():
        linear.weight.zero_()
    assert query.weight.any()  # a copy
    usual = NonlinearQuery.from_linear(linear, start="usual")
    assert (usual(x_BTD) - linear(x_BTD)).abs().max() > 0.1


@pytest.mark.parametrize("scale", [0.5, 1.0])
def test_takes_over_half_precision_to_the_last_bit(scale: float) -> None:
    linear, x_BTD = nn.Linear(D, D, bias=False, dtype=torch.bfloat16), torch.randn(2, 7, D, dtype=torch.bfloat16)
    query = NonlinearQuery.from_linear(linear, scale=scale)
    assert query.weight.dtype == torch.bfloat16
    assert torch.equal(query(x_BTD), linear(x_BTD))


def test_takes_over_the_queries_of_a_model_and_then_moves() -> None:
    config = ModelConfig(n_layers=2, d_model=D, n_heads=2, d_ff=8, context=7, vocab_size=29, bias=True)
    model, ids_BT = GPT(config, seed=1), torch.randint(29, (2, 7))
    expected = model(ids_BT).detach()
    for block in model.blocks:
        block.attention.query = NonlinearQuery.from_linear(block.attention.query)
    assert_close(model(ids_BT), expected, atol=1e-6, rtol=0)
    query = model.blocks[0].attention.query
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for first in (True, False):
        optimizer.zero_grad()
        model.loss(ids_BT, ids_BT).backward()
        assert query.post_gain.grad.any()
        assert query.weight.grad.any()
        assert query.w1.grad.any() != first  # behind a gain of zero, for one step
        assert query.w2.grad.any() != first
        optimizer.step()
        assert query.post_gain.all()


def test_what_is_no_pretrained_weight_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no linear projection: it has to be x W"):
        NonlinearQuery.from_linear(NonlinearQuery(D, anchor="linear"))
    with pytest.raises(ValueError, match=r"no linear projection"):
        NonlinearQuery.from_linear(nn.Identity())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"scale = 0 cannot be made up for"):
        NonlinearQuery.from_linear(nn.Linear(D, D), scale=0.0)
