"""The zoo's mixers: each one's formula in plain loops, and what every mixer owes: causality, decoding, counts."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from qurve.accounting import count
from qurve.config import from_json, to_json
from qurve.errors import BadInput
from qurve.model.cache import Cache
from qurve.model.config import LayerOverride, ModelConfig, Subspaces
from qurve.model.gpt import GPT
from qurve.model.mixers import MixerConfig
from qurve.model.positions import NoPositions, Rope, rotate
from qurve.model.residual import Skip
from qurve.model.view import View
from qurve.projections import Bottleneck
from qurve.zoo.linear_attention import LinearAttention
from qurve.zoo.linear_attention_modules import EPS
from qurve.zoo.mlp_attention import MLPAttention
from qurve.zoo.primer import Primer

LENGTH, VOCABULARY = 13, 29
SKIPLESS = Skip(attention=False)


def tiny(mixer: MixerConfig, **changes: Any) -> ModelConfig:
    sizes = {"n_layers": 2, "d_model": 18, "n_heads": 3, "d_ff": 31, "context": LENGTH, "vocab_size": VOCABULARY}
    return ModelConfig(**{**sizes, "mixer": mixer, **changes})


GROUPED: dict[str, Any] = {"n_heads": 4, "n_kv_heads": 2, "d_head": 6, "positions": Rope(), "qk_norm": True}
CONFIGS = {
    "primer": tiny(Primer()),
    "primer-gqa": tiny(Primer(2), query=Bottleneck("none"), **GROUPED),
    "primer-skipless": tiny(Primer(1), residual=SKIPLESS, window=5, attention_softcap=3.0),
    "linear": tiny(LinearAttention()),
    "linear-gqa": tiny(LinearAttention("softmax"), **GROUPED),
    "linear-mqa": tiny(LinearAttention("relu", "softmax"), n_kv_heads=1, positions=NoPositions(), bias=True),
    "linear-elsewhere": tiny(LinearAttention(), overrides=(LayerOverride((1,), mixer=Primer()),)),
    "mlp": tiny(MLPAttention()),
    "mlp-mqa": tiny(MLPAttention(7), n_kv_heads=1, positions=NoPositions(), bias=True, window=5, attention_softcap=3.0),
    "mlp-skipless": tiny(MLPAttention(), residual=SKIPLESS, share_blocks=True),
    "mlp-subspaces": tiny(MLPAttention(), subspaces=Subspaces(v=3, kv=2)),
}
each = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def tokens(batch: int = 2) -> Tensor:
    return torch.randint(VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


def model_of(config: ModelConfig) -> GPT:
    """In evaluation, with every parameter moved off its start."""
    model, generator = GPT(config, seed=1).eval(), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def layer_of(config: ModelConfig) -> Any:
    return model_of(config).double().blocks[1].attention


def view_of(config: ModelConfig, **changes: Any) -> View:
    return View(config.attends, 0, LENGTH, torch.device("cpu"), **changes)


def heads_of(t_TO: Tensor, heads: int) -> list[Tensor]:
    return list(t_TO.chunk(heads, dim=-1))


# ------------------------------------------------------------------------------------------------------------- formulas


def test_primer_convolves_each_channel_and_attends() -> None:
    config = tiny(Primer(), n_kv_heads=1)
    layer, x_TD = layer_of(config), torch.randn(LENGTH, 18, dtype=torch.float64)
    convolved = []
    kernels = layer.kernel_WO.split([18, 6, 6], dim=1)
    for name, kernel_WO in zip(("query", "key", "value"), kernels, strict=True):
        p_TO = x_TD @ getattr(layer, name).weight.T
        y_TO = p_TO.clone()
        for t in range(LENGTH):
            for back in range(min(3, t + 1)):
                y_TO[t] += kernel_WO[back] * p_TO[t - back]
        convolved.append(y_TO)
    q_TO, k_TE, v_TE = convolved
    rows = []
    for q_TE in heads_of(q_TO, 3):
        weights = [(q_TE[t] @ k_TE[: t + 1].T / 6**0.5).softmax(-1) for t in range(LENGTH)]
        rows.append(torch.stack([w @ v_TE[: len(w)] for w in weights]))
    expected_TD = torch.cat(rows, dim=-1) @ layer.output.weight.T
    assert_close(layer((x_TD[None],), view_of(config))[0], expected_TD)


def test_primer_starts_as_softmax_attention() -> None:
    with torch.no_grad():
        plain, primer = (GPT(tiny(mixer), seed=3)(tokens()) for mixer in (ModelConfig().mixer, Primer()))
    assert torch.equal(plain, primer)


MAPS = {"elu": lambda x: F.elu(x) + 1, "relu": F.relu, "softmax": lambda x: x.softmax(-1)}


@pytest.mark.parametrize("attends", ["causal", "bidirectional"])
@pytest.mark.parametrize(
    ("maps", "rotary"), [(("elu", "elu"), False), (("elu", "softmax"), True), (("softmax", "relu"), False)]
)
def test_linear_attention_averages_with_kernel_weights(attends: Any, maps: tuple[Any, Any], rotary: bool) -> None:
    positions = Rope(theta=50.0) if rotary else NoPositions()
    config = tiny(LinearAttention(*maps), n_heads=4, n_kv_heads=2, d_head=6, attends=attends, positions=positions)
    model, x_TD = model_of(config).double(), torch.randn(LENGTH, 18, dtype=torch.float64)
    layer, view = model.blocks[1].attention, model.view(tokens(1))
    phi, psi = (MAPS[name] for name in maps)
    queries = [phi(t) for t in heads_of(x_TD @ layer.query.weight.T, 4)]
    keys = [psi(t) for t in heads_of(x_TD @ layer.key.weight.T, 2)]
    values = heads_of(x_TD @ layer.value.weight.T, 2)
    rows = []
    for head, q_TE in enumerate(queries):
        k_TE, v_TE = keys[head // 2], values[head // 2]
        turned = [rotate(positions, t_TE[None, None], view.rotation)[0, 0] if rotary else t_TE for t_TE in (q_TE, k_TE)]
        for t in range(LENGTH):
            above, below = torch.zeros(6, dtype=torch.float64), EPS
            for s in range(t + 1 if attends == "causal" else LENGTH):
                above = above + (turned[0][t] @ turned[1][s]) * v_TE[s]
                below = below + q_TE[t] @ k_TE[s]
            rows.append(above / below)
    found_TO = torch.stack(rows).view(4, LENGTH, 6).transpose(0, 1).flatten(1)
    tolerance = {"atol": 1e-6, "rtol": 1e-6} if rotary else {}  # rotations are of float32
    assert_close(layer((x_TD[None],), view)[0], found_TO @ layer.output.weight.T, **tolerance)


@pytest.mark.parametrize(("padding", "window", "cap"), [(0, LENGTH, None), (4, LENGTH, 0.7), (2, 5, None)])
def test_mlp_attention_takes_its_weights_from_the_token_that_looks(
    padding: int, window: int, cap: float | None
) -> None:
    heads = {"n_heads": 4, "n_kv_heads": 2, "d_head": 6}
    config = tiny(MLPAttention(7), window=window, attention_softcap=cap, **heads)
    layer, x_TD = layer_of(config), torch.randn(LENGTH, 18, dtype=torch.float64)
    values = heads_of(x_TD @ layer.value.weight.T, 2)
    rows = []
    for head in range(4):
        w1_FD, w2_CF = layer.hidden.weight.view(4, 7, 18)[head], layer.columns_HCF[head]
        for t in range(padding, LENGTH):
            logits_C = w2_CF @ (w1_FD @ x_TD[t]).relu()
            logits_C = logits_C if cap is None else cap * torch.tanh(logits_C / cap)
            seen = torch.arange(max(padding, t - window + 1), t + 1)
            rows.append(logits_C[seen - padding].softmax(-1) @ values[head // 2][seen])
    expected_TO = torch.stack(rows).view(4, LENGTH - padding, 6).transpose(0, 1).flatten(1)
    found_TD = layer((x_TD[None],), view_of(config, padding_B=torch.tensor([padding])))[0]
    assert_close(found_TD[padding:], expected_TO @ layer.output.weight.T)
    if not padding:
        assert_close(layer((x_TD[None],), view_of(config))[0], found_TD)


@pytest.mark.parametrize("mixer", [Primer(), MLPAttention()], ids=lambda m: m.kind)
def test_without_a_skip_the_start_is_near_the_identity(mixer: MixerConfig) -> None:
    config = tiny(mixer, residual=SKIPLESS, d_model=60)
    layer, x_BTD = GPT(config, seed=1).blocks[1].attention, torch.randn(2, LENGTH, 60)
    with torch.no_grad():
        own_BTD = layer.output(layer.value(x_BTD))
        assert (layer((x_BTD,), view_of(config)) - own_BTD).norm() < 0.2 * own_BTD.norm()


# ------------------------------------------------------------------------------------------------ what every mixer owes


@each
def test_nothing_later_is_seen(config: ModelConfig) -> None:
    model, ids_BT = model_of(config), tokens()
    changed_BT = ids_BT.clone()
    changed_BT[:, 7:] = (changed_BT[:, 7:] + 1) % VOCABULARY
    with torch.no_grad():
        assert torch.equal(model(ids_BT)[:, :7], model(changed_BT)[:, :7])
    embedded: list[Tensor] = []
    model.token_embedding.register_forward_hook(lambda _m, _i, out: embedded.append(out.retain_grad() or out))
    model(ids_BT)[:, :7].square().sum().backward()
    gradient_BTD = embedded[0].grad
    assert gradient_BTD is not None
    assert gradient_BTD[:, 7:].count_nonzero() == 0
    assert gradient_BTD[:, :7].count_nonzero(dim=-1).min() > 0


@each
def test_one_token_at_a_time_is_the_whole_forward(config: ModelConfig) -> None:
    model, ids_BT, cache = model_of(config), tokens(), Cache(config, 2)
    with torch.no_grad():
        parts = [
            model(part, cache) for part in (ids_BT[:, :3], ids_BT[:, 3:4], ids_BT[:, 4:7], *ids_BT[:, 7:].split(1, 1))
        ]
        assert_close(torch.cat(parts, dim=1), model(ids_BT), atol=1e-5, rtol=0)  # fmt: skip


@each
def test_padding_at_the_left_changes_nothing(config: ModelConfig) -> None:
    model, padding_B = model_of(config), torch.tensor([0, 5])
    ids_BT = tokens()
    cache = Cache(config, 2, padding_B=padding_B)
    with torch.no_grad():
        alone_TV = model(ids_BT[1:, 5:])[0]
        padded_BTV = model(ids_BT, padding_B=padding_B)
        assert_close(padded_BTV[1, 5:], alone_TV, atol=1e-5, rtol=0)
        assert_close(padded_BTV[0], model(ids_BT[:1])[0], atol=1e-5, rtol=0)
        parts = [model(part, cache) for part in (ids_BT[:, :4], *ids_BT[:, 4:].split(1, dim=1))]
        decoded_BTV = torch.cat(parts, dim=1)
        assert_close(decoded_BTV[1, 5:], alone_TV, atol=1e-5, rtol=0)
        assert padded_BTV.isfinite().all()
        assert decoded_BTV.isfinite().all()


@each
def test_it_is_counted_as_built_and_as_run(config: ModelConfig) -> None:
    with torch.device("meta"):
        model, ids_BT = GPT(config), torch.zeros(2, LENGTH, dtype=torch.long)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    with FlopCounterMode(display=False) as counter:
        model(ids_BT)
    found = count(config)
    assert found.total == sum(sizes.values())
    assert found.forward_flops_per_token * 2 * LENGTH == counter.get_total_flops()


def test_parameters_are_those_that_the_docstrings_state() -> None:
    plain = count(tiny(ModelConfig().mixer)).total
    assert count(tiny(Primer())).total - plain == 2 * 3 * (3 + 2 * 3) * 6
    assert count(tiny(LinearAttention())).total == plain
    assert count(tiny(MLPAttention(7))).total - plain == 2 * (3 * 7 * (18 + LENGTH) - 2 * 18 * 18)


def test_bidirectional_sums_are_counted_as_run() -> None:
    config = tiny(LinearAttention(), attends="bidirectional", n_kv_heads=1)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        GPT(config)(torch.zeros(2, LENGTH, dtype=torch.long))
    assert count(config).forward_flops_per_token * 2 * LENGTH == counter.get_total_flops()


@pytest.mark.parametrize("length", [5, LENGTH])
@each
def test_decoding_state_is_as_large_as_stated(config: ModelConfig, length: int) -> None:
    for layer, state in enumerate(Cache(config, 2, length).states):
        here = config.at(layer)
        numbers = sum(t.numel() for t in vars(state).values())
        assert numbers == 2 * here.mixer.state_numbers(here, length)
    if config.mixer.kind == "linear_attention":
        assert config.mixer.state_numbers(config, 1) == config.mixer.state_numbers(config, 10**6)


@pytest.mark.parametrize(("held", "new"), [(0, 3), (4, 1), (4, 5)])
@each
def test_decoding_is_counted_as_run(config: ModelConfig, held: int, new: int) -> None:
    with torch.device("meta"):
        model, cache = GPT(config), Cache(config, 2)
        model(torch.zeros(2, held, dtype=torch.long), cache) if held else None
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(2, new, dtype=torch.long), cache)
    others = count(config).forward_flops_per_token
    for layer in range(config.n_layers):
        here = config.at(layer)
        others -= here.mixer.mixing_flops(here, LENGTH)
        if isinstance(here.mixer, LinearAttention):
            others += here.mixer.decoding_flops(here, held, new)
        else:
            others += here.mixer.mixing_flops(here, held + new)
    assert counter.get_total_flops() == others * 2 * new


@each
def test_a_few_steps_lower_the_loss(config: ModelConfig) -> None:
    model, ids_BT = GPT(config, seed=1), tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model.loss(ids_BT[:, :-1], ids_BT[:, 1:])
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("name", ["primer-gqa", "linear-gqa", "mlp-skipless"])
def test_it_compiles_without_a_graph_break(name: str) -> None:
    torch.compiler.reset()  # the configurations share one code object, whose compilations are limited
    model, ids_BT = model_of(CONFIGS[name]), tokens()
    compiled = torch.compile(model.loss, fullgraph=True, backend="eager")
    assert_close(compiled(ids_BT, ids_BT), model.loss(ids_BT, ids_BT))


@each
def test_half_precision_is_close(config: ModelConfig) -> None:
    model, ids_BT = model_of(config), tokens()
    with torch.no_grad():
        exact_BTV = model(ids_BT)
        with torch.autocast("cpu", torch.bfloat16):
            autocast_BTV = model(ids_BT).float()
        half, cache = model.bfloat16(), Cache(config, 2, dtype=torch.bfloat16)
        decoded_BTV = torch.cat([half(part, cache) for part in ids_BT.split(1, dim=1)], dim=1).float()
    assert (autocast_BTV - exact_BTV).norm() < 0.04 * exact_BTV.norm()
    assert (decoded_BTV - exact_BTV).norm() < 0.04 * exact_BTV.norm()


@each
def test_it_survives_json_and_a_state_dict(config: ModelConfig) -> None:
    again = from_json(ModelConfig, to_json(config))
    assert again == config
    model, other = model_of(config), GPT(again)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model(tokens()), other.eval()(tokens()))


def test_linear_attention_sums_stay_in_float32() -> None:
    state = Cache(tiny(LinearAttention()), 1, dtype=torch.bfloat16).states[0]
    assert state.keys.dtype == state.keys_values.dtype == torch.float32
    assert Cache(tiny(LinearAttention()), 1, dtype=torch.float64).states[0].keys.dtype == torch.float64


@pytest.mark.parametrize("module", ["qurve.model.config", "qurve.model.mixers", "qurve.config"])
def test_kinds_are_known_whatever_is_imported_first(module: str) -> None:
    code = (
        f"import {module}\nfrom qurve.config import from_dict\nfrom qurve.model.config import ModelConfig\n"
        "print(*[from_dict(ModelConfig, {'mixer': {'kind': kind}}).mixer.kind "
        "for kind in ('primer', 'linear_attention', 'mlp_attention')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["primer", "linear_attention", "mlp_attention"]


# ------------------------------------------------------------------------------------------------ other views, refusals


@pytest.mark.parametrize("mixer", [Primer(), LinearAttention(), MLPAttention()], ids=lambda m: m.kind)
def test_bidirectional_tokens_see_both_sides(mixer: MixerConfig) -> None:
    model, ids_BT = model_of(tiny(mixer, n_layers=1, attends="bidirectional")), tokens()
    changed_BT = ids_BT.clone()
    changed_BT[:, 6] = (changed_BT[:, 6] + 1) % VOCABULARY
    with torch.no_grad():
        assert (model(ids_BT) != model(changed_BT)).any(-1).all()


@pytest.mark.parametrize("mixer", [Primer(), MLPAttention()], ids=lambda m: m.kind)
def test_a_prefix_sees_itself_and_no_more(mixer: MixerConfig) -> None:
    model, ids_BT, prefix_B = model_of(tiny(mixer, attends="prefix")), tokens(), torch.tensor([6, 6])
    within_BT, behind_BT = ids_BT.clone(), ids_BT.clone()
    within_BT[:, 5] = (within_BT[:, 5] + 1) % VOCABULARY
    behind_BT[:, 6] = (behind_BT[:, 6] + 1) % VOCABULARY
    with torch.no_grad():
        usual_BTV = model(ids_BT, prefix_B=prefix_B)
        assert (usual_BTV != model(within_BT, prefix_B=prefix_B)).any(-1).all()
        assert torch.equal(usual_BTV[:, :6], model(behind_BT, prefix_B=prefix_B)[:, :6])


def test_mlp_attention_keeps_to_any_mask() -> None:
    config = tiny(MLPAttention(), n_layers=1)
    model, ids_BT = model_of(config), tokens()
    apart_1TT = torch.block_diag(torch.ones(6, 6), torch.ones(7, 7)).bool()[None]
    changed_BT = ids_BT.clone()
    changed_BT[:, :6] = (changed_BT[:, :6] + 1) % VOCABULARY
    with torch.no_grad():
        first, second = (model(ids, allowed_BTT=apart_1TT)[:, 6:] for ids in (ids_BT, changed_BT))
        assert torch.equal(first, second)


@pytest.mark.parametrize("mixer", [Primer(), LinearAttention()], ids=lambda m: m.kind)
def test_arbitrary_masks_are_refused_where_tokens_are_mixed_without_one(mixer: MixerConfig) -> None:
    with pytest.raises(ValueError, match=r"allowed_BTT.*; use the mixer 'softmax'"):
        GPT(tiny(mixer))(tokens(), allowed_BTT=torch.ones(1, LENGTH, LENGTH, dtype=torch.bool))


@pytest.mark.parametrize(
    ("mixer", "changes", "message"),
    [
        (LinearAttention(), {"window": 3}, r"model\.mixer: linear attention's sums forget nothing"),
        (LinearAttention(), {"attends": "prefix"}, r"it knows no prefix; use the mixer 'softmax'"),
        (LinearAttention(), {"attention_softcap": 3.0}, r"no logits that model\.attention_softcap could act on"),
        (LinearAttention(), {"attention_scale": 0.5}, r"no logits that model\.attention_scale could act on"),
        (LinearAttention(), {"residual": SKIPLESS}, r"keep model\.residual\.attention, or use"),
        (MLPAttention(), {"query": Bottleneck()}, r"no query projection; leave model\.query at 'linear'"),
        (MLPAttention(), {"key": Bottleneck()}, r"no key projection; leave model\.key at 'linear'"),
        (MLPAttention(), {"qk_norm": True}, r"no queries and keys to normalise; leave model\.qk_norm"),
        (MLPAttention(), {"positions": Rope()}, r"no queries and keys to rotate; use learned positions or none"),
        (MLPAttention(), {"attention_scale": 0.5}, r"leave model\.attention_scale"),
        (MLPAttention(), {"subspaces": Subspaces(qk=2)}, r"to see model\.subspaces\.qk; allot those channels to v"),
    ],
)
def test_what_cannot_be_is_refused_with_a_way_out(mixer: MixerConfig, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        tiny(mixer, **changes)


def test_widths_below_one_are_refused() -> None:
    with pytest.raises(BadInput, match=r"mixer\.width = 0: it must be at least 1"):
        Primer(0)
    with pytest.raises(BadInput, match=r"mixer\.hidden = 0: it must be at least 1"):
        MLPAttention(0)


def test_mlp_attention_drops_weights_in_training() -> None:
    config = tiny(MLPAttention(), dropout=0.5)
    layer, x_BTD = layer_of(config), torch.randn(1, LENGTH, 18, dtype=torch.float64)
    usual_BHTE = layer.mixed((x_BTD,), view_of(config), None, None)
    assert torch.equal(layer.mixed((x_BTD,), view_of(config), None, None), usual_BHTE)
    dropped_BHTE = layer.train().mixed((x_BTD,), view_of(config), None, None)
    assert (dropped_BHTE != usual_BHTE).any(-1).float().mean() > 0.5
