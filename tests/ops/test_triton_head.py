"""The head as a Triton kernel, held against the projection's own forward: outputs, every gradient, odd shapes.

The kernels run in Triton's interpreter (`conftest.py` switches it on).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from qurve import GPT, NonlinearQuery
from qurve.model.config import ModelConfig
from qurve.projections import Bottleneck, Dims, Linear
from qurve.projections.module import Projection, project, set_impl

pytest.importorskip("triton")
from qurve.ops import triton_head

TOKENS = 63


class Case(NamedTuple):
    config: Bottleneck
    dims: Dims = Dims(60, 60)
    tokens: int = TOKENS


CASES = {
    "paper": Case(Bottleneck(width=17)),
    "bias": Case(Bottleneck(width=17), Dims(60, 60, bias=True)),
    "one-token": Case(Bottleneck(width=17), tokens=1),
    # Behind a norm the gradient of one unit alone would be nothing but cancellation.
    "one-unit": Case(Bottleneck(width=1, post_norm="none"), Dims(5, 5)),
    "two-programs-wide": Case(Bottleneck(width=70), Dims(144, 144), tokens=65),
    "relu": Case(Bottleneck(width=17, activation="relu", pre_norm="layernorm")),
    "relu2": Case(Bottleneck("linear", 17, "relu2", "rmsnorm", "rmsnorm"), Dims(20, 36)),
    "silu": Case(Bottleneck("linear", 33, "silu", "layernorm", "layernorm", 1e-2, -2.0), Dims(36, 20, bias=True)),
    "no-norms": Case(Bottleneck("none", 17, "identity", "none", "none", scale=1.0), Dims(20, 36, bias=True)),
    "no-anchor": Case(Bottleneck("none", 17, post_norm="rmsnorm"), Dims(36, 7)),
}
PRECISIONS = {"float32": (torch.float32, False), "bf16": (torch.bfloat16, False), "autocast": (torch.float32, True)}


def stirred(case: Case, dtype: torch.dtype) -> Projection:
    """Every parameter moved away from its start, so that each one matters."""
    module = Projection(case.config, case.dims, dtype=dtype)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(0.4 * torch.randn_like(p) if p.dim() > 1 else p + 0.3 * torch.randn_like(p))
    return module


def everything(
    module: Projection, x: Tensor, upstream: Tensor, *, autocast: bool = False, fused: bool = False
) -> dict[str, Tensor]:
    """The output and the gradients of the input and of every parameter; `fused`: of the plain head behind the stem."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        stem = module.config.stem(module)
        y = module.head("reference", F.linear(x.to(stem.dtype), stem), x) if fused else module(x)
    y.backward(upstream.to(y.dtype))
    assert x.grad is not None
    found = {"y": y.detach(), "x": x.grad}
    for name, p in module.named_parameters():
        assert p.grad is not None
        found[name] = p.grad
    return found


def check(case: Case, dtype: torch.dtype, autocast: bool) -> None:
    """An error of at most twice torch's own in the same dtype, be it in the plain forward or in the plain head behind
    the stem (near a kink of the activation these two fall on different sides), and of one rounding (where torch's
    happens to be nothing). All from float64 with the very same numbers, over all entries (Euclidean norm)."""
    products = torch.bfloat16 if autocast else dtype
    module = stirred(case, dtype)
    exact = Projection(case.config, case.dims, dtype=torch.float64)
    exact.load_state_dict(module.state_dict())
    x = torch.randn(case.tokens, case.dims.d_in, dtype=dtype)
    upstream = torch.randn(case.tokens, case.dims.d_out).to(products)
    true = everything(exact, x.double(), upstream.double())
    torchs = [everything(module, x, upstream, autocast=autocast, fused=fused) for fused in (False, True)]
    set_impl(module, "triton")
    found = everything(module, x, upstream, autocast=autocast)
    assert found.keys() == true.keys()
    for name, value in found.items():
        assert value.dtype == torchs[0][name].dtype, name
        error, *torchs_errors = ((t[name].double() - true[name]).norm().item() for t in (found, *torchs))
        allowed = 2 * max(torchs_errors) + torch.finfo(products).eps * true[name].norm().item()
        assert error <= allowed, f"{name}: {error:.3g} from float64, and torch's own errors are {torchs_errors}"


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that nobody has written holds NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.ones(3).new_empty(2).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


# -------------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_is_as_exact_as_the_plain_forward(case: Case, precision: str) -> None:
    check(case, *PRECISIONS[precision])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    def choose(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    d_in = draw(st.integers(1, 20))
    anchor = choose("identity", "linear", "none")
    config = Bottleneck(
        anchor,
        draw(st.integers(1, 20)),
        choose("gelu", "relu", "relu2", "silu", "identity"),
        choose("rmsnorm", "layernorm", "none"),
        choose("rmsnorm", "layernorm", "none"),
        choose(1e-5, 1e-2),
        choose(0.5, 1.0, -2.0),
    )
    d_out = d_in if anchor == "identity" else draw(st.integers(1, 20))
    return Case(config, Dims(d_in, d_out, choose(True, False)), draw(st.integers(0, 70)))


@settings(max_examples=25)
@given(cases())
def test_is_the_formula_for_all_options(case: Case) -> None:
    """In float32 against the plain forward in float64, up to what float32 can tell: a norm over one or two numbers is
    mostly cancellation, and another order of the same sums then shows."""
    module = stirred(case, torch.float32)
    exact = Projection(case.config, case.dims, dtype=torch.float64)
    exact.load_state_dict(module.state_dict())
    x, upstream = torch.randn(case.tokens, case.dims.d_in), torch.randn(case.tokens, case.dims.d_out)
    true, plain = everything(exact, x.double(), upstream.double()), everything(module, x, upstream)
    set_impl(module, "triton")
    for name, value in everything(module, x, upstream).items():
        if value.numel():
            plain_error = (plain[name].double() - true[name]).abs().max().item()
            allowed = 8 * plain_error + 1e-5 * (1 + true[name].abs().max().item())
            assert (value.double() - true[name]).abs().max().item() <= allowed, name


def test_nothing_becomes_of_no_tokens() -> None:
    module = stirred(CASES["bias"], torch.float32)
    set_impl(module, "triton")
    found = everything(module, torch.randn(0, 60), torch.randn(0, 60))
    assert found["y"].shape == (0, 60)
    assert not any(value.any() for value in found.values())


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("anchor", ["identity", "linear"])
def test_takes_its_rows_of_the_common_product(anchor: Any) -> None:
    """Beside a key and a value the stem's rows, and the anchor's, lie apart in memory."""
    query = stirred(Case(Bottleneck(anchor, 17), Dims(36, 36)), torch.float32)
    key, value = (stirred(Case(Linear(), Dims(36, 20)), torch.float32) for _ in "kv")  # type: ignore[arg-type]
    x_BTD, found = torch.randn(2, 7, 36), {}
    for impl in ("reference", "triton"):
        set_impl(query, impl)
        x = x_BTD.clone().requires_grad_()
        outputs = project([key, query, value], x)
        torch.cat(outputs, dim=-1).square().sum().backward()
        parameters = [p for module in (key, query, value) for p in module.parameters()]
        found[impl] = [*outputs, x.grad, *(p.grad.clone() for p in parameters)]
        for p in parameters:
            p.grad = None
    assert_close(found["triton"], found["reference"], rtol=1e-4, atol=1e-4)


def test_same_input_same_bits() -> None:
    module, x = stirred(CASES["bias"], torch.bfloat16), torch.randn(TOKENS, 60, dtype=torch.bfloat16)
    set_impl(module, "triton")
    once, again = (everything(module, x, torch.ones(TOKENS, 60)) for _ in range(2))
    for name in once:
        assert torch.equal(once[name], again[name])


def test_nan_stays_nan() -> None:
    """A training that diverges has to show it."""
    for activation in ("gelu", "relu", "relu2", "silu"):
        layer = NonlinearQuery(
            12, activation=activation, post_norm="none", pre_norm="none", anchor="none", impl="triton"
        )
        x = torch.randn(3, 12)
        x[1, 2] = torch.nan
        assert layer(x).isnan().any(-1).tolist() == [False, True, False]


# ------------------------------------------------------------------------------------------------------- as an operator


def test_torch_accepts_the_operators() -> None:
    """Schemas, fake tensors, autograd and tracing, as torch's own check of custom operators sees them."""
    s, x, w2, gain = torch.randn(5, 4), torch.randn(5, 6), torch.randn(6, 4), torch.randn(6)
    for t in (s, x, w2, gain):
        t.requires_grad_()
    rule = ("gelu", "rmsnorm", "layernorm", 1e-5, 0.5)
    torch.library.opcheck(triton_head._head, (s, x, w2, None, None, gain, None, None, True, *rule, True))
    detached = [t.detach() for t in (torch.randn(5, 6), s, x, w2, torch.randn(4), gain, torch.randn(5, 6))]
    torch.library.opcheck(triton_head._head_backward, (*detached, True, *rule, torch.bfloat16, True, True))


def test_keeps_one_tensor_of_its_own_for_the_backward_pass() -> None:
    layer, x = NonlinearQuery(60, width=17, impl="triton"), torch.randn(TOKENS, 60, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    own = [t for t in kept if not any(t is p or t.data_ptr() == p.data_ptr() for p in (x, *layer.parameters()))]
    # The folded stem, for its own product; s; y.
    assert sorted({t.data_ptr(): tuple(t.shape) for t in own}.values()) == [(60, 17), (TOKENS, 17), (TOKENS, 60)]


def test_gradients_of_gradients_are_refused() -> None:
    layer, x = NonlinearQuery(12, impl="triton"), torch.randn(3, 12, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="bottleneck_head_backward"):
        grad.sum().backward()


def test_only_what_needs_a_gradient_gets_one() -> None:
    layer = NonlinearQuery(12, impl="triton").requires_grad_(False)
    layer.w1.requires_grad_()
    layer(torch.randn(3, 12)).sum().backward()
    assert {name for name, p in layer.named_parameters() if p.grad is not None} == {"w1"}


# ----------------------------------------------------------------------------------------------------- in a whole model

MODEL = ModelConfig(n_layers=2, d_model=24, n_heads=2, d_ff=32, context=11, vocab_size=40, query=Bottleneck(width=5))


def loss_and_gradients(model: GPT, compiled: bool = False) -> list[Tensor]:
    ids_BT = torch.arange(22).view(2, 11) * 7 % 40
    loss_of = torch.compile(model.loss, backend="aot_eager", fullgraph=True) if compiled else model.loss
    loss = loss_of(ids_BT, ids_BT.flip(0))
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "traced"])
def test_a_model_learns_the_same(compiled: bool) -> None:
    model = GPT(MODEL, seed=1)
    expected = loss_and_gradients(model)
    set_impl(model, "triton")
    assert_close(loss_and_gradients(model, compiled), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of what it imports to compile
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch's tracer, on tensors that our code does not ask about
def test_a_model_with_compiled_heads_learns_the_same() -> None:
    torch._dynamo.reset()
    counted = torch._dynamo.utils.counters["stats"]
    before = counted["unique_graphs"]  # of this process, whatever else it compiled
    model = GPT(MODEL, seed=1)
    expected = loss_and_gradients(model)
    set_impl(model, "compiled")
    assert_close(loss_and_gradients(model), expected, rtol=1e-4, atol=1e-6)
    assert counted["unique_graphs"] == before + 1, "one graph for the heads of all blocks"


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_what_somebody_has_changed_acts() -> None:
    x_BTD = torch.randn(2, 7, 12)
    for change in (
        lambda q: nn.utils.parametrize.register_parametrization(q, "w2", Doubled()),
        lambda q: q.register_forward_hook(lambda _m, _x, y: 2 * y),
        lambda q: q.register_forward_pre_hook(lambda _m, x: (2 * x[0] + 1,)),
    ):
        query = NonlinearQuery(12, impl="triton", post_norm="none")
        before = query(x_BTD)
        change(query)
        found = [query(x_BTD), project([query, Linear().build(12, 12), Linear().build(12, 12)], x_BTD)[0]]
        query.impl = "reference"
        assert_close(found, [query(x_BTD)] * 2)
        assert not torch.allclose(found[0], before)
