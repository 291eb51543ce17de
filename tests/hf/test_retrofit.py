"""Pretrained models of every family with nonlinear queries: the right outputs change, and all of it can be undone."""

from __future__ import annotations

import copy
import functools
import pickle
import re
from typing import Any

import pytest
import torch
import transformers
from tiny_families import FAMILIES, LAYERS, D, batch, tiny
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from qurve import hf
from qurve.errors import BadInput
from qurve.hf.part import parts
from qurve.projections import Bottleneck

LINEAR = Bottleneck(width=3, activation="identity", pre_norm="none", post_norm="none", scale=0.7)
"""Without norms and activation `f` is a matrix of rank 3, which can be written into the weight by hand."""


def logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**inputs).logits


def stir(model: nn.Module) -> None:
    """Move every new parameter, as training would."""
    torch.manual_seed(5)
    with torch.no_grad():
        for part in parts(model).values():
            for p in part.parameters():
                p.add_(0.5 * torch.randn_like(p))


# --------------------------------------------------------------------------------------------------------- every family


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_found_and_starts_as_it_was(name: str) -> None:
    model, inputs = tiny(name), batch(name)
    before, size = logits(model, inputs), sum(p.numel() for p in model.parameters())
    report = hf.retrofit(model)
    assert report.names == tuple(FAMILIES[name].paths.format(i) for i in range(LAYERS))
    assert report.logit_change == 0.0
    assert torch.equal(logits(model, inputs), before)
    assert report.total == size + report.added
    assert report.added == report.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)
    stir(model)
    assert (logits(model, inputs) - before).abs().max() > 1e-3


@pytest.mark.parametrize("name", FAMILIES)
def test_the_queries_change_and_nothing_else(name: str) -> None:
    """A part that is a matrix is the stock model with that matrix in its query weight."""
    by_hand, model, inputs = tiny(name), tiny(name), batch(name)
    hf.retrofit(model, LINEAR, exact_start=False)
    stir(model)
    with torch.no_grad():
        for path, part in parts(model).items():
            FAMILIES[name].write(by_hand.get_submodule(path), 0.7 * part.w2 @ part.w1)
    expected = logits(by_hand, inputs)
    assert (expected - logits(tiny(name), inputs)).abs().max() > 1e-2
    assert_close(logits(model, inputs), expected, atol=2e-5, rtol=2e-5)


def test_in_gpt2s_cross_attention_it_is_the_queries_too() -> None:
    """There `c_attn` holds keys and values, and the queries have a weight of their own."""
    by_hand, model = (tiny("gpt2", add_cross_attention=True) for _ in range(2))
    inputs = batch("gpt2") | {"encoder_hidden_states": torch.randn(2, 5, D, generator=torch.Generator().manual_seed(1))}
    report = hf.retrofit(model, LINEAR, exact_start=False, layers=[0])
    assert report.names == ("transformer.h.0.attn.c_attn", "transformer.h.0.crossattention.q_attn")
    stir(model)
    with torch.no_grad():
        for path, part in parts(model).items():
            FAMILIES["gpt2"].write(by_hand.get_submodule(path), 0.7 * part.w2 @ part.w1)
    assert_close(logits(model, inputs), logits(by_hand, inputs), atol=2e-5, rtol=2e-5)
    path = "transformer.h.*.crossattention.c_attn"
    refused("come from q_attn, not from c_attn", tiny("gpt2", add_cross_attention=True), path=path)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "qwen3", "bert", "vit"])
def test_restored_bit_for_bit(name: str) -> None:
    model, inputs = tiny(name), batch(name)
    model.lm_head = getattr(model, "lm_head", nn.Identity())
    first = next(model.parameters()).requires_grad_(False)  # frozen by somebody before
    state, shown, before = copy.deepcopy(model.state_dict()), repr(model), logits(model, inputs)
    hf.retrofit(model)
    stir(model)
    assert not torch.equal(logits(model, inputs), before)
    hf.restore(model)
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert repr(model) == shown
    assert torch.equal(logits(model, inputs), before)
    assert [p.requires_grad for p in model.parameters()].count(False) == 1
    assert not first.requires_grad
    assert not [m for m in model.modules() if m._forward_hooks]
    hf.retrofit(model)  # and again
    assert torch.equal(logits(model, inputs), before)


FLEX = ["gpt_neox", "gemma3"]  # GPT-2 has no such attention
SLOW = (pytest.mark.slow, pytest.mark.filterwarnings("default"))  # torch's own, of its compiler


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *((name, "eager") for name in ("gpt2", "gpt_neox", "gemma3")),
        *(pytest.param(name, "flex_attention", marks=SLOW) for name in FLEX),
    ],
)
def test_the_attention_function_is_left_alone(name: str, attention: str) -> None:
    expected, model = tiny(name), tiny(name, attention)
    hf.retrofit(expected)
    hf.retrofit(model)
    stir(expected)
    stir(model)
    assert model.config._attn_implementation == attention
    assert_close(logits(model, batch(name)), logits(expected, batch(name)), atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_cached_generation_with_left_padding(name: str) -> None:
    model = tiny(name)
    hf.retrofit(model)
    stir(model)
    short, long = torch.tensor([[5, 9, 11]]), torch.tensor([[7, 8, 21, 4, 6]])
    padded = torch.cat([torch.tensor([[0, 0]]), short], dim=1)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    together = model.generate(
        input_ids=torch.cat([padded, long]), attention_mask=mask, max_new_tokens=6, do_sample=False
    )
    for row, prompt in ((0, short), (1, long)):
        ids = prompt
        for _ in range(6):  # without a cache and without padding
            ids = torch.cat([ids, logits(model, {"input_ids": ids})[:, -1].argmax(-1, keepdim=True)], dim=1)
        assert together[row, -6:].tolist() == ids[0, -6:].tolist()


# -------------------------------------------------------------------------------------------------------------- options


def test_report_can_be_read() -> None:
    said = str(hf.retrofit(tiny("llama"), Bottleneck(width=4)))
    assert "2 query layers made nonlinear: model.layers.0.self_attn.q_proj … model.layers.1.self_attn.q_proj" in said
    added = 2 * (2 * 4 * D + 2 * D)
    assert f"{added:,} parameters added" in said
    assert "largest change of a logit: 0" in said


def test_the_report_has_the_largest_change() -> None:
    model, inputs = tiny("llama"), batch("llama")
    before = logits(model, inputs)
    report = hf.retrofit(model.train(), anchor="identity", exact_start=False, probe=inputs)
    assert model.training
    assert all(module.training for module in model.modules())
    assert report.logit_change == (logits(model.eval(), inputs) - before).abs().max().item()


def test_a_model_that_takes_more_than_the_probe_is_not_measured() -> None:
    sizes = {key: FAMILIES["vit"].fields[key] for key in FAMILIES["vit"].fields}
    config = transformers.CLIPConfig(text_config={**FAMILIES["bert"].fields}, vision_config=sizes, projection_dim=8)
    model = transformers.CLIPModel(config)
    report = hf.retrofit(model, path="text_model.encoder.layers.*.self_attn.q_proj")
    assert (len(report.names), report.logit_change) == (LAYERS, None)


def test_layers_by_their_numbers() -> None:
    model = tiny("gpt2")
    assert hf.retrofit(model, layers=[1]).names == ("transformer.h.1.attn.c_attn",)
    assert list(parts(model)) == ["transformer.h.1.attn.c_attn"]


def test_without_freezing_no_flag_changes() -> None:
    model = tiny("llama")
    model.model.embed_tokens.requires_grad_(False)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    hf.retrofit(model, freeze=False)
    assert {n: p.requires_grad for n, p in model.named_parameters() if "nonlinear" not in n} == flags


def test_the_start_is_the_seeds_and_leaves_the_stream_alone() -> None:
    one, same, other = tiny("llama"), tiny("llama"), tiny("llama")
    state = torch.get_rng_state()
    hf.retrofit(one)
    assert torch.equal(torch.get_rng_state(), state)
    hf.retrofit(same)
    hf.retrofit(other, seed=1)
    first, second = (p.w1 for p in parts(one).values())
    assert torch.equal(first, next(iter(parts(same).values())).w1)
    assert not torch.equal(first, next(iter(parts(other).values())).w1)
    assert not torch.equal(first, second)
    assert first.std().item() == pytest.approx(0.02, rel=0.2)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "bert"])
def test_other_anchors_take_the_queries_place(name: str) -> None:
    """An identity weight in the stock model is the identity anchor of a part whose `f` is nothing."""
    by_hand, model, inputs = tiny(name), tiny(name), batch(name)
    report = hf.retrofit(model, LINEAR, anchor="identity", exact_start=False)
    assert report.logit_change is not None
    assert report.logit_change > 0
    with torch.no_grad():
        for path, part in parts(model).items():
            layer = by_hand.get_submodule(path)
            weight = torch.zeros(D, D)
            FAMILIES[name].write(layer, weight)  # (to see the sign of nothing)
            part.w2.zero_()
            _overwrite(name, layer, 0.7 * torch.eye(D))
    assert_close(logits(model, inputs), logits(by_hand, inputs), atol=2e-5, rtol=2e-5)


def _overwrite(name: str, layer: nn.Module, weight_QD: Tensor) -> None:
    """Put a query weight in the old one's place, without a bias."""
    if name == "gpt2":
        layer.weight[:, :D], layer.bias[:D] = weight_QD.T, 0
    elif name == "gpt_neox":
        layer.weight.view(4, 3, 8, D)[:, 0], layer.bias.view(4, 3, 8)[:, 0] = weight_QD.view(4, 8, D), 0
    else:
        layer.weight.copy_(weight_QD)
        layer.bias.zero_()


def test_half_precision_keeps_the_new_weights_in_float32() -> None:
    model = tiny("gpt2").to(torch.bfloat16)
    before = logits(model, batch("gpt2"))
    report = hf.retrofit(model)
    assert report.logit_change == 0.0
    assert {p.dtype for part in parts(model).values() for p in part.parameters()} == {torch.float32}
    after = logits(model, batch("gpt2"))
    assert torch.equal(after, before)
    assert after.dtype == torch.bfloat16
    stir(model)
    assert logits(model, batch("gpt2")).isfinite().all()


def test_no_memory_is_needed_on_meta() -> None:
    with torch.device("meta"):
        model = tiny("llama")
    assert hf.retrofit(model).logit_change is None


class Own(nn.Module):
    """Somebody's own model."""

    def __init__(self, attention_class: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(attention_class() for _ in range(3))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return functools.reduce(lambda x, block: x + block(x), self.blocks, x_BTD)


class OwnAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wqkv = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 18)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return (self.wq(x_BTD) @ self.wk(x_BTD).transpose(1, 2)).softmax(-1) @ x_BTD


def test_any_model_by_an_explicit_path() -> None:
    model, x_BTD = Own(OwnAttention), torch.randn(2, 5, 6)
    expected = model(x_BTD)
    assert hf.retrofit(model, path="blocks.*.wq", layers=[0, 2]).logit_change is None
    hf.restore(model)
    report = hf.retrofit(model, path="blocks.*.wq", probe={"x_BTD": x_BTD})
    assert (report.names, report.logit_change) == (("blocks.0.wq", "blocks.1.wq", "blocks.2.wq"), 0.0)
    assert_close(model(x_BTD), expected)
    stir(model)
    assert (model(x_BTD) - expected).abs().max() > 1e-3


def test_a_family_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hf.FAMILIES, "OwnAttention", hf.Place("wq"))
    assert len(hf.retrofit(Own(OwnAttention)).names) == 3


# -------------------------------------------------------------------------------------------------------------- refused


def refused(said: str, model: Any, *args: Any, **options: Any) -> None:
    """A call that is refused and changes nothing."""
    shown = repr(model)
    flags = [p.requires_grad for p in model.parameters()] if isinstance(model, nn.Module) else None
    with pytest.raises(BadInput, match=said):
        hf.retrofit(model, *args, **options)
    assert repr(model) == shown
    if flags is not None:
        assert [p.requires_grad for p in model.parameters()] == flags


def test_nothing_found_says_what_was_looked_for() -> None:
    refused(
        r"no query weight found in Own; it has OwnAttention at blocks\.0\. Looked for .*LlamaAttention",
        Own(OwnAttention),
    )
    refused(r"nothing in Own is at path = 'blocks\.\*\.q'", Own(OwnAttention), path="blocks.*.q")
    refused("retrofitted as a loaded instance, and this is 'gpt2'", "gpt2")


def test_layers_that_are_not_there() -> None:
    refused(r"layers = \[1, 7\]: \[7\] is not there; there are 0, 1", tiny("llama"), layers=[1, 7])
    refused("nothing is not there", tiny("llama"), layers=[])
    for layers in ("last", 1, None, [0.5]):
        refused("'all', or numbers", tiny("llama"), layers=layers)


def test_a_path_to_more_than_queries() -> None:
    refused(
        r"blocks\.0\.wqkv has 18 outputs, so that it gives more than queries", Own(OwnAttention), path="blocks.*.wqkv"
    )
    refused("come from q_proj, not from k_proj", tiny("llama"), path="model.layers.*.self_attn.k_proj")
    refused("is no linear layer but OwnAttention", Own(OwnAttention), path="blocks.*")


def test_options_that_cannot_be() -> None:
    refused("takes the place of the pretrained queries", tiny("llama"), anchor="identity")
    refused("norms the pretrained queries too", tiny("llama"), Bottleneck(norm_stage="separate"))
    refused("post_norm = 'none' has none; .* or exact_start=False", tiny("llama"), Bottleneck(post_norm="none"))
    refused(r"q_proj: the identity anchor .* 32 -> 64", tiny("qwen3"), anchor="identity", exact_start=False)
    refused("'bottleneck', or a", tiny("llama"), "linear")
    refused("anchor = 'lineal' takes|anchor = 'lineal'", tiny("llama"), anchor="lineal")


def test_twice_is_refused() -> None:
    model = tiny("llama")
    hf.retrofit(model, layers=[0])
    refused(r"retrofitted already \(1 layers, model\.layers\.0", model, layers=[1])


def test_what_is_not_retrofitted_cannot_be_restored() -> None:
    model = tiny("llama")
    for function in (hf.restore, hf.fold, hf.merge):
        with pytest.raises(BadInput, match="LlamaForCausalLM is not retrofitted"):
            function(model)
    hf.retrofit(model)
    with pytest.raises(BadInput, match="give that one"):
        hf.restore(model.model)


def test_what_was_wrapped_for_several_processes_is_refused() -> None:
    """It would not share the new parameters' gradients."""
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = tiny("llama")
    refused("retrofit the model, then wrap it", wrapped)


class ByName(OwnAttention):
    """One that calls its layers by the names of their arguments."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.wq(input=x_BTD)  # type: ignore[no-any-return]


def test_a_layer_that_the_hook_cannot_serve_is_left_as_it_was() -> None:
    model, x_BTD = Own(ByName), torch.randn(2, 5, 6)
    expected = model(x_BTD)
    refused("called by the names of its arguments", model, path="blocks.*.wq", probe={"x_BTD": x_BTD})
    assert torch.equal(model(x_BTD), expected)


# ------------------------------------------------------------------------------------------------------ nobody is hurt


def test_other_instances_and_other_patches_are_untouched() -> None:
    model, bystander, inputs = tiny("llama"), tiny("llama"), batch("llama")
    before = logits(bystander, inputs)
    layer, seen = model.model.layers[0].self_attn.q_proj, []
    handle = layer.register_forward_hook(lambda module, args, output: seen.append(output))
    plain = layer.forward
    layer.forward = lambda x: plain(x) * 1.0  # type: ignore[method-assign]
    hf.retrofit(model)
    stir(model)
    assert torch.equal(logits(bystander, inputs), before)
    assert not hasattr(bystander, "qurve_retrofit")
    hf.restore(model)
    seen.clear()
    assert torch.equal(logits(model, inputs), before)
    assert len(seen) == 1
    assert layer.forward is not plain
    handle.remove()


def test_copies_have_parts_of_their_own() -> None:
    model, inputs = tiny("gpt2"), batch("gpt2")
    hf.retrofit(model)
    copied, thawed = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    before = logits(model, inputs)
    stir(copied)
    assert torch.equal(logits(model, inputs), before)
    assert torch.equal(logits(thawed, inputs), before)
    assert not torch.equal(logits(copied, inputs), before)
    hf.restore(copied)
    assert torch.equal(logits(copied, inputs), before)


@pytest.mark.slow
def test_compiles_in_one_graph() -> None:
    model, inputs = tiny("llama"), batch("llama")
    hf.retrofit(model)
    stir(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_close(logits(compiled, {**inputs, "use_cache": False}), logits(model, inputs))


@pytest.mark.slow
def test_what_was_compiled_before_notices() -> None:
    model, inputs = tiny("llama"), {**batch("llama"), "use_cache": False}
    compiled = torch.compile(model, backend="eager")
    before = logits(compiled, inputs)
    hf.retrofit(model, freeze=False)  # (torch notices what is frozen)
    stir(model)
    assert_close(logits(compiled, inputs), logits(model, inputs))
    assert (logits(compiled, inputs) - before).abs().max() > 1e-3
    hf.restore(model)
    assert_close(logits(compiled, inputs), before)


def test_the_stock_files_stay_readable(tmp_path: Any) -> None:
    """The base's own weights keep their names, so `save_pretrained` writes a checkpoint of the base and more."""
    model, inputs = tiny("gpt2"), batch("gpt2")
    before = logits(model, inputs)
    hf.retrofit(model)
    stir(model)
    model.save_pretrained(tmp_path)
    found, told = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert torch.equal(logits(found.eval(), inputs), before)
    assert not told["missing_keys"]
    assert all(".nonlinear." in key for key in told["unexpected_keys"])


# ---------------------------------------------------------------------------------------------------- merging, folding


def test_merging_is_refused_with_the_reason() -> None:
    model = tiny("llama")
    hf.retrofit(model)
    with pytest.raises(BadInput, match=r"cannot be merged into W_Q: f\(x\) is no linear map"):
        hf.merge(model)


@pytest.mark.parametrize(
    "config", [Bottleneck(), Bottleneck(pre_norm="layernorm", post_norm="rmsnorm", scale=0.3), LINEAR], ids=str
)
def test_folding_changes_the_numbers_by_rounding_alone(config: Bottleneck, capsys: pytest.CaptureFixture[str]) -> None:
    model, inputs = tiny("gpt_neox"), batch("gpt_neox")
    hf.retrofit(model, config, exact_start=False)
    stir(model)
    before = logits(model, inputs)
    found = hf.fold(model)
    assert found is not None
    assert 0 <= found < 1e-4
    assert f"largest change of a logit: {found:.3g}" in capsys.readouterr().out
    assert_close(logits(model, inputs), before, atol=1e-4, rtol=1e-4)
    for part in parts(model).values():
        assert part.config.scale == 1.0  # type: ignore[attr-defined]
        assert part.get("pre_gain") is None or torch.equal(part.pre_gain, torch.ones(D))
    assert re.search(r"scale=1\.0", str(model.qurve_retrofit))


@pytest.mark.parametrize(
    ("anchor", "stage", "scale"),
    [("identity", "coupled", 0.5), ("identity", "separate", 0.5), ("none", "coupled", 1.0), ("none", "separate", 0.5)],
)
def test_folding_leaves_what_other_anchors_need(anchor: Any, stage: Any, scale: float) -> None:
    """The scale of an identity, the gain of a norm that the anchor goes through too, a scale before a norm."""
    model, inputs = tiny("bert"), batch("bert")
    hf.retrofit(model, Bottleneck(norm_stage=stage), anchor=anchor, exact_start=False)
    stir(model)
    before = logits(model, inputs)
    hf.fold(model)
    assert_close(logits(model, inputs), before, atol=1e-4, rtol=1e-4)
    assert model.qurve_retrofit.config.scale == scale
