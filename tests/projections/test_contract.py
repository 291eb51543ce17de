"""What every projection must keep, whatever its kind: shapes, token-locality, costs, gradients, fusing, files.

The cases come from the registry. A kind that `OPTIONS` does not know runs with its defaults, so that a new one is
covered as soon as it is registered.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from leaves import another, places
from qurve.config import content_hash, from_json, to_json
from qurve.model.config import ModelConfig
from qurve.plugins import load_plugins
from qurve.projections import Bottleneck, Dims, Identity, Linear, MLPReuse, ProjectionConfig, Residual
from qurve.projections.base import Moments
from qurve.projections.module import STD, Projection, is_bare, project, reads_nothing_else
from qurve.projections.prepared import prepare
from qurve.zoo.projections import GatedOutput, NonlinearLoRA

load_plugins()  # a kind from outside is held to the same

D, WIDER, OTHER = 12, 20, 26
"""Input width, the output width of the kinds that may have another, and that of what some kinds also read."""

ACTIVATIONS = ("gelu", "relu", "relu2", "silu", "identity")
NORMS = ("rmsnorm", "layernorm", "none")
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "bottleneck": [
        {},
        {"anchor": "linear"},
        *({"activation": activation} for activation in ACTIVATIONS[1:]),
        *({"width": width} for width in (3, 5, 31)),
        *({"scale": scale} for scale in (1.0, 0.3)),
        *(
            {"anchor": anchor, "pre_norm": pre, "post_norm": post, "activation": ACTIVATIONS[i % 5], "eps": 0.01}
            for i, (anchor, pre, post) in enumerate(itertools.product(("identity", "linear", "none"), NORMS, NORMS))
        ),
        *(
            {"norm_stage": "separate", "anchor": anchor, "pre_norm": pre, "post_norm": post, "scale": 0.7}
            for anchor, pre, post in itertools.product(("identity", "linear", "none"), NORMS, NORMS)
        ),
        {"start": "exact"},
        {"start": "exact", "anchor": "linear", "post_norm": "rmsnorm"},
    ],
    "residual": [{}, {"scale": 0.8}],
    "nonlinear_lora": [{}, {"activation": "identity"}, {"rank": 3, "alpha": 5.0, "activation": "silu"}],
    "mlp_reuse": [{}, {"sliced": True}, {"scale": 0.8}],
}


def also_read(x: Tensor) -> Tensor:
    """A second source: a fixed function of each token, `OTHER` wide, without a matrix product."""
    return torch.cat([x.sin(), x.cos(), x[..., :2]], dim=-1)


def alone(module: nn.Module, x: Tensor) -> Tensor:
    """The module on one input, and on its second source if it reads one."""
    y: Tensor = module(x) if reads_nothing_else(module) else module(x, also_read(x))
    return y


class Case(NamedTuple):
    config: ProjectionConfig
    dims: Dims

    def build(self) -> Projection:
        """A float64 module with every parameter moved away from its start, so that each one matters."""
        module = Projection(self.config, self.dims, dtype=torch.float64)
        with torch.no_grad():
            for p in module.parameters():
                p.copy_(0.4 * torch.randn_like(p) if p.dim() > 1 else p + 0.3 * torch.randn_like(p))
        return module

    @property
    def multiplies(self) -> bool:
        return self.config.flops_per_token(self.dims) > 0


def dims_of(config: ProjectionConfig, d_out: int, bias: bool) -> Dims:
    return Dims(D, d_out, bias, OTHER if config.also_reads else 0)


def accepts(config: ProjectionConfig, dims: Dims) -> bool:
    try:
        config.check(dims)
    except ValueError:
        return False
    return True


def cases() -> Iterator[Any]:
    for kind, cls in ProjectionConfig.registry.items():
        for options, bias in itertools.product(OPTIONS.get(kind, [{}]), (False, True)):
            config = cls(**options)
            widths = [dims for d_out in (D, WIDER) if accepts(config, dims := dims_of(config, d_out, bias))]
            assert widths, f"{config} takes neither {D} nor {WIDER}"
            for dims in widths if len(options) < 2 else widths[-1:]:
                words = [kind, *(f"{name}={value}" for name, value in options.items())]
                words += ["bias"] * bias + [f"to={dims.d_out}"] * (dims.d_out != D)
                yield pytest.param(Case(config, dims), id=",".join(words))


CASES = list(cases())
every_case = pytest.mark.parametrize("case", CASES)
plain_cases = pytest.mark.parametrize("case", [c for c in CASES if c.id in ProjectionConfig.registry])


def test_every_kind_is_covered() -> None:
    assert {c.id for c in CASES} >= ProjectionConfig.registry.keys()
    assert {"linear", "identity", "residual", "bottleneck"} <= ProjectionConfig.registry.keys()


# ------------------------------------------------------------------------------------------------ what it is, and costs


@every_case
def test_shapes(case: Case) -> None:
    module = case.build()
    for leading in ((), (7,), (2, 7), (2, 1, 3), (0, 7)):
        x = torch.randn(*leading, D, dtype=torch.float64)
        assert alone(module, x).shape == (*leading, case.dims.d_out)
        assert [y.shape for y in project([module, module], x, also_read(x))] == [(*leading, case.dims.d_out)] * 2


@every_case
def test_each_token_stands_alone(case: Case) -> None:
    module = case.build()
    x_BTD = torch.randn(2, 7, D, dtype=torch.float64)
    y_BTO = alone(module, x_BTD)
    changed_BTD = x_BTD.clone()
    changed_BTD[:, 3] = torch.randn(2, D)
    others = [0, 1, 2, 4, 5, 6]
    y_changed_BTO = alone(module, changed_BTD)
    assert_close(y_changed_BTO[:, others], y_BTO[:, others], rtol=1e-12, atol=1e-13)
    assert not torch.isclose(y_changed_BTO[:, 3], y_BTO[:, 3]).any(-1).all()
    shuffled = torch.randperm(7)
    assert_close(alone(module, x_BTD[:, shuffled]), y_BTO[:, shuffled], rtol=1e-12, atol=1e-13)


@every_case
@torch.no_grad()
def test_outputs_stay_within_their_reach(case: Case) -> None:
    """Input and output side by side span no more than the input does and what goes beyond a linear term."""
    x_MD = torch.randn(150, D, dtype=torch.float64)
    y_MO, reach = alone(case.build(), x_MD), case.config.reach(case.dims)
    together = torch.cat([x_MD, y_MO], dim=-1) if reach.linear else y_MO
    rank = torch.linalg.matrix_rank(together - together.mean(0), rtol=1e-9)
    assert rank <= D * reach.linear + reach.beyond
    assert 0 <= reach.beyond <= case.dims.d_out


@every_case
def test_costs_are_the_built_modules(case: Case) -> None:
    with torch.device("meta"):
        dims, x_BTD = case.dims, torch.empty(2, 7, D)
        module = case.config.build(dims.d_in, dims.d_out, bias=dims.bias, d_other=dims.d_other)
    specs = case.config.parameters(case.dims)
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == {n: s.shape for n, s in specs.items()}
    assert case.config.num_params(case.dims) == sum(p.numel() for p in module.parameters())
    for run, times in ((lambda: alone(module, x_BTD), 1), (lambda: project([module] * 3, x_BTD, also_read(x_BTD)), 3)):
        with FlopCounterMode(display=False) as counter:
            run()
        assert counter.get_total_flops() == 14 * times * case.config.flops_per_token(case.dims)


@every_case
def test_starts_as_it_says(case: Case) -> None:
    module = Projection(case.config, case.dims, dtype=torch.float64)
    again = Projection(case.config, case.dims, dtype=torch.float64)
    for m in (module, again):
        m.reset_parameters(torch.Generator().manual_seed(5))
    for name, spec in case.config.parameters(case.dims).items():
        start = module.get_parameter(name)
        assert torch.equal(start, again.get_parameter(name))
        if spec.init == "normal":
            assert 0.5 * STD < start.std(correction=0) < 1.6 * STD or start.numel() < 20
            assert start.abs().max() < 5 * STD
        else:
            assert torch.equal(start, torch.full_like(start, {"ones": 1.0, "zeros": 0.0}[spec.init]))


@every_case
def test_preserving_starts_keep_the_size(case: Case) -> None:
    """Inputs of some mean square give outputs of mean square one, on the average over the starts."""
    width, moments = 64, Moments(input=0.6, other=0.4)
    dims = Dims(width, width, case.dims.bias, 96 if case.config.also_reads else 0)
    x_MD, other_MO = (torch.randn(64, n) * m**0.5 for n, m in ((width, moments.input), (96, moments.other)))
    starts = case.config.preserving(dims, moments)
    found = []
    for _ in range(20):
        module = Projection(case.config, dims)
        with torch.no_grad():
            for name, spec in case.config.parameters(dims).items():
                if name in starts and spec.init != "zeros":
                    value, parameter = starts[name], module.get_parameter(name)
                    parameter.normal_(0, value) if spec.init == "normal" else parameter.fill_(value)
            found.append(module(x_MD, *[other_MO] * (not reads_nothing_else(module))).square().mean())
    of_the_input = case.config.identity_term**2 * moments.input
    if case.config not in (Identity(), Bottleneck(start="exact")) and of_the_input < 1:
        assert torch.stack(found).mean() == pytest.approx(1.0, abs=0.15)


@every_case
def test_the_identity_term_is_what_the_output_holds_of_the_input(case: Case) -> None:
    """With every matrix at zero, nothing but it is left."""
    module = case.build()
    with torch.no_grad():
        for name, p in module.named_parameters():
            if p.dim() == 2 or name.endswith(("bias", "b1", "b2")):
                p.zero_()
    x_BTD = torch.randn(2, 7, D, dtype=torch.float64)
    if case.config.identity_term:
        assert_close(alone(module, x_BTD), case.config.identity_term * x_BTD)
    elif getattr(case.config, "anchor", None) != "identity":
        assert not alone(module, x_BTD).any()


@every_case
def test_gradients_are_exact(case: Case) -> None:
    module = case.build()
    names = [name for name, _ in module.named_parameters()]
    x_BTD = torch.randn(2, 3, D, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        inputs = (x,) if reads_nothing_else(module) else (x, also_read(x))
        y: Tensor = torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), inputs)
        return y

    assert torch.autograd.gradcheck(run, (x_BTD, *module.parameters()), fast_mode=True)


# ----------------------------------------------------------------------------------------------------- what it computes


def norm(kind: str, x: Tensor, gain: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if kind == "none":
        return x
    centred = x - x.mean(-1, keepdim=True) if kind == "layernorm" else x
    y = gain * centred / torch.sqrt((centred**2).sum(-1, keepdim=True) / x.shape[-1] + eps)
    return y if bias is None else y + bias


def activated(kind: str, h: Tensor) -> Tensor:
    if kind == "gelu":
        return h * (1 + torch.erf(h / 2**0.5)) / 2
    if kind == "silu":
        return h / (1 + torch.exp(-h))
    return h if kind == "identity" else torch.where(h > 0, h, 0.0) ** (2 if kind == "relu2" else 1)


def written_out(module: Projection, x: Tensor) -> Tensor | None:
    """The formulas of the known kinds once more, in plain float64 mathematics."""
    c, p, other = module.config, dict(module.named_parameters()), also_read(x)
    bias = p.get("bias", 0.0)
    if isinstance(c, MLPReuse):
        return c.scale * (x + other[..., : D if c.sliced else OTHER] @ p["weight"].T + bias)
    if isinstance(c, GatedOutput):
        gate = 1 / (1 + torch.exp(-other @ p["gate"].T - p.get("gate_bias", 0.0)))
        return (x * gate) @ p["weight"].T + bias
    if isinstance(c, NonlinearLoRA):
        return x @ p["weight"].T + bias + c.alpha / c.rank * activated(c.activation, x @ p["a"].T) @ p["b"].T
    if isinstance(c, Residual):
        return c.scale * (x + x @ p["weight"].T + bias)
    if isinstance(c, Bottleneck):
        n = norm(c.pre_norm, x, p.get("pre_gain"), p.get("pre_bias"), c.eps)
        f = activated(c.activation, n @ p["w1"].T + p.get("b1", 0.0)) @ p["w2"].T + p.get("b2", 0.0)
        anchored = x if c.norm_stage == "coupled" else n
        anchor = (
            anchored @ p["weight"].T + bias if c.anchor == "linear" else anchored if c.anchor == "identity" else 0.0
        )
        post = [p.get("post_gain"), p.get("post_bias"), c.eps]
        if c.norm_stage == "coupled":
            return c.scale * (anchor + norm(c.post_norm, f, *post))
        return norm(c.post_norm, c.scale * (anchor + f), *post)
    return {"linear": lambda: x @ p["weight"].T + bias, "identity": lambda: x}.get(c.kind, lambda: None)()


@every_case
def test_computes_its_formula(case: Case) -> None:
    module = case.build()
    x_BTD = 0.3 * torch.randn(2, 7, D, dtype=torch.float64)
    expected = written_out(module, x_BTD)
    if expected is not None:
        assert_close(alone(module, x_BTD), expected, rtol=1e-11, atol=1e-12)


# --------------------------------------------------------------------------------------------------------- fused, plain

Run = typing.Callable[[list[nn.Module], Tensor], list[Tensor]]


def plain(modules: list[nn.Module], x_BTD: Tensor) -> list[Tensor]:
    return [alone(module, x_BTD) for module in modules]


def fused(modules: list[nn.Module], x_BTD: Tensor) -> list[Tensor]:
    return project(modules, x_BTD, also_read(x_BTD))


def outputs_and_gradients(run: Run, modules: list[nn.Module], x_BTD: Tensor) -> dict[str, Tensor]:
    """The outputs, and the gradients of the input and of every parameter for a fixed random direction."""
    x_BTD = x_BTD.clone().requires_grad_()
    tensors = {"x": x_BTD, **{f"{i}.{n}": p for i, m in enumerate(modules) for n, p in m.named_parameters()}}
    ys = run(modules, x_BTD)
    generator = torch.Generator().manual_seed(11)
    directions = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype) for y in ys]
    gradients = torch.autograd.grad(ys, list(tensors.values()), directions)
    for name, gradient in zip(tensors, gradients, strict=True):
        assert gradient.dtype == tensors[name].dtype
    outputs = {f"output {i}": y.detach() for i, y in enumerate(ys)}
    return outputs | {f"gradient of {name}": g for name, g in zip(tensors, gradients, strict=True)}


def companies(case: Case) -> dict[str, list[nn.Module]]:
    """The projection as query, key and value beside linear ones, thrice, and among other kinds."""
    linear = Case(Linear(), case.dims._replace(d_other=0))
    placed = {
        name: [(case if i == place else linear).build() for i in range(3)]
        for place, name in enumerate(("query", "key", "value"))
    }
    thrice = [case.build() for _ in range(3)]
    mixed = [
        Case(config, dims_of(config, D, case.dims.bias)).build()
        for config in (kind() for kind in ProjectionConfig.registry.values())
    ]
    return {**placed, "thrice": thrice, "mixed": [*mixed, case.build()]}


@every_case
def test_fused_is_plain(case: Case) -> None:
    x_BTD = torch.randn(2, 7, D, dtype=torch.float64)
    for name, modules in companies(case).items():
        assert all(is_bare(module) for module in modules)
        found, expected = (outputs_and_gradients(run, modules, x_BTD) for run in (fused, plain))
        for what in expected:
            assert_close(found[what], expected[what], rtol=1e-11, atol=1e-12, msg=lambda m: f"{name}, {what}: {m}")  # noqa: B023


@every_case
@torch.inference_mode()
def test_prepared_is_plain(case: Case) -> None:
    """Folded, stacked and, in float32 on a CPU with oneDNN, packed."""
    x_BTD = torch.randn(2, 7, D, dtype=torch.float64)
    for name, modules in companies(case).items():
        expected = plain(modules, x_BTD)
        for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 2e-5)):
            same = [copy.deepcopy(module).to(dtype) for module in modules]
            found = fused(prepare(same, dtype, pack=dtype == torch.float32), x_BTD.to(dtype))
            for y, exact in zip(found, expected, strict=True):
                size = max(1.0, exact.abs().max().item())
                assert_close(y.double(), exact, rtol=0, atol=tolerance * size, msg=lambda m: f"{name}: {m}")  # noqa: B023


def error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {what: (found[what].double() - exact[what]).norm().item() for what in exact}


def comparable(case: Case, what: str) -> bool:
    """ReLU's gradient jumps at zero, where rounding decides the side: nothing bounds one path's error by another's."""
    return what.startswith("output") or getattr(case.config, "activation", "") != "relu"


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
def test_fused_is_as_exact_as_plain(case: Case, dtype: torch.dtype) -> None:
    """The error against float64 is at most twice that of the plain forward in the same dtype."""
    x_BTD = torch.randn(4, 32, D).to(dtype)
    modules = [module.to(dtype) for module in companies(case)["query"]]
    exact = outputs_and_gradients(plain, [copy_in_float64(m) for m in modules], x_BTD.double())
    found, expected = (outputs_and_gradients(run, modules, x_BTD) for run in (fused, plain))
    assert all(found[what].dtype == expected[what].dtype == dtype for what in exact)
    allowed = error(expected, exact)
    for what, e in error(found, exact).items():
        if comparable(case, what):
            assert e <= 2 * allowed[what] + 4 * torch.finfo(dtype).eps * exact[what].norm(), what


def copy_in_float64(module: Projection) -> Projection:
    double = Projection(module.config, module.dims, dtype=torch.float64)
    double.load_state_dict(module.state_dict())
    return double


@every_case
def test_autocast(case: Case) -> None:
    """Matrix products give the compute dtype, and float32 masters get float32 gradients."""
    x_BTD = torch.randn(4, 32, D)  # drawn before what depends on the registry
    modules = [module.float() for module in companies(case)["query"]]
    exact = outputs_and_gradients(plain, [copy_in_float64(m) for m in modules], x_BTD.double())

    def under_autocast(run: Run) -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return outputs_and_gradients(run, modules, x_BTD)

    found, expected = under_autocast(fused), under_autocast(plain)
    for tensors in (found, expected):
        assert tensors["output 0"].dtype == (torch.bfloat16 if case.multiplies else torch.float32)
        assert tensors["output 1"].dtype == torch.bfloat16
    allowed = error(expected, exact)
    for what, e in error(found, exact).items():
        if comparable(case, what):
            assert e <= 2 * allowed[what] + 4 * torch.finfo(torch.bfloat16).eps * exact[what].norm(), what
            assert allowed[what] <= 0.1 * exact[what].norm(), what


# -------------------------------------------------------------------------------------------------- files and compilers


@every_case
def test_round_trips(case: Case) -> None:
    module, other = case.build(), case.build()
    x_BTD = torch.randn(2, 7, D, dtype=torch.float64)
    other.load_state_dict(module.state_dict())
    assert torch.equal(alone(other, x_BTD), alone(module, x_BTD))
    model = ModelConfig(d_model=D, n_heads=3, **dict.fromkeys(places(case.config), case.config))
    read = from_json(ModelConfig, to_json(model))
    assert read == model
    assert all(type(getattr(read, place)) is type(case.config) for place in places(case.config))


@plain_cases
def test_every_option_counts_in_the_hash(case: Case) -> None:
    hints = typing.get_type_hints(type(case.config))
    place = places(case.config)[0]
    seen = {content_hash(ModelConfig(**{place: case.config}))}
    for field in dataclasses.fields(case.config):
        value = another(hints[field.name], getattr(case.config, field.name))
        seen.add(content_hash(ModelConfig(**{place: dataclasses.replace(case.config, **{field.name: value})})))
    assert len(seen) == 1 + len(dataclasses.fields(case.config))


COMPILED = [c for c in CASES if c.id in {*ProjectionConfig.registry, "bottleneck,anchor=linear,bias,to=20"}]


@pytest.mark.parametrize("case", COMPILED)
def test_compiles_without_a_graph_break(case: Case) -> None:
    torch._dynamo.reset()
    modules = companies(case)["query"]
    x_BTD = torch.randn(2, 7, D, dtype=torch.float64)
    module = torch.compile(modules[0], fullgraph=True, backend="eager")
    assert_close(alone(module, x_BTD), alone(modules[0], x_BTD))
    together = torch.compile(fused, fullgraph=True, backend="eager")
    for found, expected in zip(together(modules, x_BTD), plain(modules, x_BTD), strict=True):
        assert_close(found, expected)
