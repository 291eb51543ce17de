"""`project`: one matrix product for all that is bare, and the own forward of whatever somebody has changed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from qurve.projections import Bottleneck, Dims, Identity, Linear, ProjectionConfig, Residual
from qurve.projections.module import Projection, is_bare, project

D = 12


def build(config: ProjectionConfig, d_out: int = D, bias: bool = False) -> Projection:
    module = Projection(config, Dims(D, d_out, bias), dtype=torch.float64)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return module


class MatrixProducts(TorchDispatchMode):
    """Records the width of every matrix product's result."""

    def __init__(self) -> None:
        super().__init__()
        self.widths: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::matmul"):
            self.widths.append(out.shape[-1])
        return out


def product_widths(run: Callable[[], object]) -> list[int]:
    with torch.no_grad(), MatrixProducts() as products:
        run()
    return products.widths


# --------------------------------------------------------------------------------------------------- one matrix product


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("query", "widths"),
    [
        (Linear(), [3 * D]),
        (Bottleneck(), [5 * D // 2, D]),  # the stems' product has 2.5 D rows; w2 follows
        (Bottleneck(anchor="linear", width=4), [3 * D + 4, D]),
        (Residual(), [3 * D]),
        (Identity(), [2 * D]),
    ],
    ids=["linear", "paper", "linear-anchor", "residual", "identity"],
)
def test_stems_share_one_product(query: ProjectionConfig, widths: list[int], bias: bool) -> None:
    modules = [build(config, bias=bias) for config in (query, Linear(), Linear())]
    x_BTD = torch.randn(2, 7, D, dtype=torch.float64)
    for turn in itertools.permutations(modules):
        assert product_widths(lambda turn=turn: project(turn, x_BTD)) == widths


def test_one_alone_is_run_plainly() -> None:
    x_BTD = torch.randn(2, 7, D, dtype=torch.float64)
    for modules in ([build(Bottleneck())], [build(Identity()), build(Bottleneck())]):
        assert product_widths(lambda m=modules: project(m, x_BTD)) == [D // 2, D]
    assert project([], x_BTD) == []


def test_other_dtypes_stay_apart() -> None:
    """A half-precision key beside a float32 query gives what it gives alone."""
    modules = [build(Linear()).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float32)]
    x_BTD = torch.randn(2, 7, D)
    for found, module in zip(project(modules, x_BTD), modules, strict=True):
        assert found.dtype == module(x_BTD).dtype
        assert_close(found, module(x_BTD))


# ------------------------------------------------------------------------------------------------ what was changed acts


class Adapter(nn.Module):
    """A low-rank addition around a projection, as adapter libraries inject it."""

    def __init__(self, base: Projection) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(D, 2, bias=False, dtype=torch.float64)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return cast(Tensor, self.base(x_BTD)) + self.down(x_BTD).sum(-1, keepdim=True)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Own(Projection):
    def forward(self, x_BTD: Tensor) -> Tensor:
        return 3 * super().forward(x_BTD)


def own(module: Projection) -> nn.Module:
    other = Own(module.config, module.dims, dtype=torch.float64)
    other.load_state_dict(module.state_dict())
    return other


def matrix_name(module: Projection) -> str:
    return next(name for name, p in module.named_parameters() if p.dim() == 2)


def changed(change: Callable[[Projection], object]) -> Callable[[Projection], nn.Module]:
    def apply(module: Projection) -> nn.Module:
        change(module)
        return module

    return apply


def fewer_bits(module: Projection) -> None:
    """A tensor subclass in a parameter's place, as quantisation does it."""

    class Rounded(nn.Parameter):
        pass

    name = matrix_name(module)
    weight = module.get_parameter(name)
    setattr(module, name, Rounded((weight * 4).round() / 4))


CHANGES: dict[str, Callable[[Projection], nn.Module]] = {
    "adapter": Adapter,
    "forward-hook": changed(lambda m: m.register_forward_hook(lambda _m, _x, y: 2 * y)),
    "forward-hook-kwargs": changed(lambda m: m.register_forward_hook(lambda _m, _x, _k, y: 2 * y, with_kwargs=True)),
    "forward-pre-hook": changed(lambda m: m.register_forward_pre_hook(lambda _m, x: (2 * x[0] + 1,))),
    "parametrised": changed(lambda m: parametrize.register_parametrization(m, matrix_name(m), Doubled())),
    "pruned": changed(lambda m: prune.random_unstructured(m, matrix_name(m), 0.5)),
    "own-forward": changed(lambda m: m.__dict__.update(forward=lambda x, f=m.forward: 2 * f(x))),
    "subclass": own,
    "quantised": changed(fewer_bits),
}


@pytest.mark.parametrize("place", [0, 1, 2], ids=["query", "key", "value"])
@pytest.mark.parametrize("config", [Linear(), Residual(), Bottleneck(), Bottleneck(anchor="linear")], ids=str)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_acts_and_the_others_stay_fused(
    change: Callable[[Projection], nn.Module], config: ProjectionConfig, place: int
) -> None:
    modules: list[nn.Module] = [build(Linear()) for _ in range(3)]
    bare = build(config)
    x_BTD = torch.randn(2, 7, D, dtype=torch.float64)
    before = bare(x_BTD)
    modules[place] = change(bare)
    assert not is_bare(modules[place])
    found = project(modules, x_BTD)
    for y, module in zip(found, modules, strict=True):
        assert_close(y, module(x_BTD), rtol=1e-11, atol=1e-12)
    assert not torch.allclose(found[place], before), "the change must matter, or this test sees nothing"
    alone = product_widths(lambda: modules[place](x_BTD))
    assert sorted(product_widths(lambda: project(modules, x_BTD))) == sorted([2 * D, *alone])


@pytest.mark.parametrize("register", [nn.Module.register_full_backward_hook, nn.Module.register_full_backward_pre_hook])
def test_backward_hooks_act(register: Callable[..., Any]) -> None:
    modules = [build(Linear()), build(Bottleneck()), build(Linear())]
    calls: list[object] = []
    register(modules[1], lambda *args: calls.append(args))
    assert [is_bare(module) for module in modules] == [True, False, True]
    x_BTD = torch.randn(2, 7, D, dtype=torch.float64, requires_grad=True)
    torch.stack(project(modules, x_BTD)).sum().backward()
    assert len(calls) == 1


def test_removing_a_hook_makes_it_bare_again() -> None:
    module = build(Bottleneck())
    handle = module.register_forward_hook(lambda *_: None)
    assert not is_bare(module)
    handle.remove()
    assert is_bare(module)


@pytest.mark.parametrize(
    "add",
    [
        lambda m: m.register_parameter("extra", nn.Parameter(torch.ones(1))),
        lambda m: m.register_parameter("w1", None) or m.__dict__.update(w1=torch.ones(D // 2, D)),
        lambda m: m.register_module("extra", nn.Linear(2, 2)),
    ],
    ids=["parameter", "parameter-taken-away", "child"],
)
def test_something_added_is_not_bare(add: Callable[[Projection], object]) -> None:
    module = build(Bottleneck())
    add(module)
    assert not is_bare(module)


def test_functional_parameters_act() -> None:
    """`torch.func.functional_call` over a container: the tensors handed in are the ones used, and carry gradients."""
    modules = nn.ModuleList([build(Linear()), build(Bottleneck()), build(Linear())])

    class Together(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = modules

        def forward(self, x_BTD: Tensor) -> Tensor:
            return torch.stack(project(list(self.inner), x_BTD))

    x_BTD = torch.randn(2, 7, D, dtype=torch.float64)
    doubled = {name: 2 * p for name, p in Together().named_parameters()}
    y = torch.func.functional_call(Together(), doubled, x_BTD)
    assert_close(y[0], 2 * modules[0](x_BTD))
    assert len(torch.autograd.grad(y.sum(), list(doubled.values()))) == len(doubled)


def test_foreign_modules_may_stand_among_them() -> None:
    modules = [nn.Linear(D, 5, dtype=torch.float64), build(Bottleneck()), build(Linear(), d_out=20)]
    x_BTD = torch.randn(2, 7, D, dtype=torch.float64)
    for found, module in zip(project(modules, x_BTD), modules, strict=True):
        assert_close(found, module(x_BTD))


# -------------------------------------------------------------------------------------------------------------- algebra


@st.composite
def projections(draw: st.DrawFn, d_in: int, bias: bool) -> Projection:
    def choose(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    d_out = choose(d_in, draw(st.integers(1, 9)))
    anchor = choose("identity", "linear", "none") if d_out == d_in else choose("linear", "none")
    bottleneck = Bottleneck(
        anchor,
        draw(st.integers(1, 9)),
        choose("gelu", "relu", "relu2", "silu", "identity"),
        choose("rmsnorm", "layernorm", "none"),
        choose("rmsnorm", "layernorm", "none"),
        choose(1e-5, 1e-2),
        choose(0.5, 1.0, -2.0),
    )
    square = [Identity(), Residual(choose(0.5, 1.5))] if d_out == d_in else []
    module = Projection(choose(bottleneck, Linear(), *square), Dims(d_in, d_out, bias), dtype=torch.float64)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return module


@given(st.data(), st.integers(1, 9), st.booleans(), st.integers(1, 5))
def test_any_set_of_projections_fuses_exactly(data: st.DataObject, d_in: int, bias: bool, tokens: int) -> None:
    modules = data.draw(st.lists(projections(d_in, bias), min_size=1, max_size=4))
    x_TD = torch.randn(tokens, d_in, dtype=torch.float64)
    for found, module in zip(project(modules, x_TD), modules, strict=True):
        assert_close(found, module(x_TD), rtol=1e-8, atol=1e-9)


@given(st.integers(1, 12), st.integers(1, 7), st.floats(1e-8, 1.0), st.floats(1e-3, 1e3))
def test_gain_and_deviation_move_past_the_product(d_in: int, width: int, eps: float, size: float) -> None:
    """RMSNorm(x) W1 = (x (g * W1)) / rms(x): what lets the stem be one matrix product."""
    x_TD, gain_D = size * torch.randn(5, d_in, dtype=torch.float64), torch.randn(d_in, dtype=torch.float64)
    w1_DR = torch.randn(d_in, width, dtype=torch.float64)
    rms_T1 = (x_TD.square().mean(-1, keepdim=True) + eps).sqrt()
    module = Projection(
        Bottleneck("none", width, "identity", post_norm="none", eps=eps, scale=1.0),
        Dims(d_in, width),
        dtype=torch.float64,
    )
    with torch.no_grad():
        module.w1.copy_(w1_DR.T)
        module.w2.copy_(torch.eye(width))
        module.pre_gain.copy_(gain_D)
    expected = (x_TD @ (gain_D[:, None] * w1_DR)) / rms_T1
    assert_close(module(x_TD), expected, rtol=1e-10, atol=1e-10)
    assert_close(module.config.stem(module), (gain_D[:, None] * w1_DR).T)


# ------------------------------------------------------------------------------------------------------------- refusals


def refusals() -> Iterator[Any]:
    def refused(message: str, config: Callable[[], ProjectionConfig], d_in: int = D, d_out: int = D) -> Any:
        return pytest.param(lambda: config().build(d_in, d_out), message, id=message)

    yield refused(r"identity anchor .* 12 -> 20; use anchor 'linear' or 'none'", Bottleneck, d_out=20)
    yield refused(r"identity projection .* 12 -> 20; use 'linear'", Identity, d_out=20)
    yield refused(r"residual projection .* 12 -> 20; use 'linear'", Residual, d_out=20)
    yield refused("width = 0: the bottleneck needs at least one unit", lambda: Bottleneck(width=0))
    yield refused("eps = 0: it must be above zero", lambda: Bottleneck(eps=0))
    yield refused("a bottleneck of half of 1 has no unit; give its width", Bottleneck, d_in=1, d_out=1)
    yield refused("the input width of a projection is 0; it must be a whole number, at least 1", Linear, d_in=0)
    yield refused("the output width of a projection is -1; it must be a whole number, at least 1", Linear, d_out=-1)


@pytest.mark.parametrize(("make", "message"), list(refusals()))
def test_what_cannot_be_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_kind_has_one_owner() -> None:
    @dataclass(frozen=True)
    class Impostor(ProjectionConfig):
        pass

    with pytest.raises(ValueError, match="'linear' is registered already"):
        ProjectionConfig.register("linear")(Impostor)
    assert ProjectionConfig.registry["linear"] is Linear
    assert ProjectionConfig.register("linear")(Linear) is Linear
