"""The nonlinear query as a method of PEFT, and beside PEFT's own LoRA."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_families import D, batch, tiny
from torch import Tensor, nn
from torch.testing import assert_close

from qurve import hf
from qurve.errors import BadInput
from qurve.hf import NonlinearQueryConfig
from qurve.hf.part import QueryPart
from qurve.hf.part import parts as retrofitted

# PEFT and accelerate call what transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::FutureWarning:peft")


@torch.no_grad()
def logits(model: nn.Module, name: str = "llama") -> Tensor:
    found: Tensor = model(**batch(name)).logits
    return found


@torch.no_grad()
def stir(model: nn.Module, seed: int, adapter: str = "default") -> None:
    torch.manual_seed(seed)
    for name, p in model.named_parameters():
        if "nonlinear_query_parts" in name and f".{adapter}." in name:
            p.add_(0.5 * torch.randn_like(p))


def adapted(name: str = "llama", **fields: object) -> PeftModel:
    return get_peft_model(tiny(name), NonlinearQueryConfig(width=4, **fields)).eval()


def test_starts_as_the_base_and_trains_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    model = adapted()
    assert torch.equal(logits(model), logits(tiny("llama")))
    added = 2 * (2 * 4 * D + 2 * D)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == added
    model.print_trainable_parameters()
    assert f"trainable params: {added:,}" in capsys.readouterr().out
    stir(model, 1)
    assert (logits(model) - logits(tiny("llama"))).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "bert", "vit", "qwen3"])
def test_is_the_retrofit(name: str) -> None:
    """The same function as the hook's, for every way in which queries are held."""
    model, other = adapted(name), tiny(name)
    hf.retrofit(other, NonlinearQueryConfig(width=4).bottleneck())
    stir(model, 1)
    mine = [m for m in model.modules() if isinstance(m, QueryPart)]
    for part, copy in zip(mine, retrofitted(other).values(), strict=True):
        copy.load_state_dict(part.state_dict())
    assert torch.equal(logits(model, name), logits(other, name))


def test_disabling_and_several_adapters_are_pefts() -> None:
    model = adapted()
    stir(model, 1)
    first = logits(model)
    model.add_adapter("second", NonlinearQueryConfig(width=6))
    stir(model, 2, "second")
    assert torch.equal(logits(model), first)
    assert {n.split(".")[-2] for n, p in model.named_parameters() if p.requires_grad} == {"default"}
    model.set_adapter("second")
    second = logits(model)
    assert (second - first).abs().max() > 1e-3
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(tiny("llama")))
    assert torch.equal(logits(model), second)
    model.set_adapter("default")
    assert torch.equal(logits(model), first)
    model.base_model.set_adapter(["default", "second"])  # one after the other
    assert (logits(model) - first).abs().max() > 1e-3
    model.delete_adapter("second")
    assert torch.equal(logits(model), first)
    assert torch.equal(logits(model.unload()), logits(tiny("llama")))


def test_adapters_add_up_and_have_the_fields_of_their_configuration() -> None:
    fields = {"activation": "relu", "pre_norm": "layernorm", "post_norm": "rmsnorm", "eps": 0.01, "scale": 0.3}
    model = adapted(**fields, exact_start=False)
    model.add_adapter("second", NonlinearQueryConfig(width=6, exact_start=False))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    first, second = (layer.nonlinear_query_parts[name] for name in ("default", "second"))
    for name, value in fields.items():
        assert getattr(first.config, name) == value, name
    assert (first.exact, bool(first.post_gain.all())) == (False, True)
    assert not any(p.requires_grad for p in second.parameters())
    model.base_model.set_adapter(["default", "second"])
    x_BTD = torch.randn(2, 5, D)
    with torch.no_grad():
        assert_close(layer(x_BTD), layer.base_layer(x_BTD) + first(x_BTD) + second(x_BTD))


def test_files_are_pefts(tmp_path: Path) -> None:
    model = adapted("gpt2", task_type="CAUSAL_LM")
    stir(model, 1)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").is_file()
    found = PeftModel.from_pretrained(tiny("gpt2"), tmp_path).eval()
    assert isinstance(found, peft.PeftModelForCausalLM)
    assert torch.equal(logits(found, "gpt2"), logits(model, "gpt2"))
    assert not any(p.requires_grad for p in found.parameters())


def test_merging_is_refused_and_changes_nothing() -> None:
    model = adapted()
    stir(model, 1)
    before = logits(model)
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(BadInput, match="cannot be merged into W_Q"):
            merge()
    assert torch.equal(logits(model), before)


def test_half_precision_and_names_of_ones_own() -> None:
    base = tiny("llama").to(torch.bfloat16)
    model = get_peft_model(base, NonlinearQueryConfig(width=4, target_modules=["0.self_attn.q_proj"]))
    parts = [m for m in model.modules() if isinstance(m, QueryPart)]
    assert len(parts) == 1
    assert {p.dtype for p in parts[0].parameters()} == {torch.float32}
    assert logits(model).dtype == torch.bfloat16


def test_bad_input() -> None:
    with pytest.raises(BadInput, match="activation = 'gleu'"):
        NonlinearQueryConfig(activation="gleu")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="come from q_proj, not from k_proj"):
        get_peft_model(tiny("llama"), NonlinearQueryConfig(target_modules=["k_proj"]))
    own = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(BadInput, match="no query weight found in Sequential"):
        get_peft_model(own, NonlinearQueryConfig())


# ------------------------------------------------------------------------------------------------------- beside LoRA


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_beside_lora_both_act_and_both_train(name: str) -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"] if name == "llama" else ["c_attn"])
    lora.fan_in_fan_out = name == "gpt2"
    model, inputs = get_peft_model(tiny(name), lora), batch(name)
    torch.manual_seed(4)
    for parameter_name, p in model.named_parameters():
        if "lora_B" in parameter_name:
            nn.init.normal_(p, std=0.3)
    with_lora = logits(model, name)
    assert (with_lora - logits(tiny(name), name)).abs().max() > 1e-3
    report = hf.retrofit(model, freeze=False)
    assert report.logit_change == 0.0
    for part in retrofitted(model).values():
        nn.init.normal_(part.post_gain)
    both = logits(model, name)
    assert (both - with_lora).abs().max() > 1e-3
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    moved = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert {"lora_A", "nonlinear"} <= {part for n in moved for part in n.split(".")}
    with model.disable_adapter():
        assert not torch.equal(logits(model, name), both)
    model.merge_adapter()  # LoRA's own weights can be merged under the nonlinear part
    assert_close(logits(model, name), both, atol=1e-4, rtol=1e-4)
    model.unmerge_adapter()
    hf.restore(model)
    assert_close(logits(model, name), with_lora, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_retrofit_outlives_the_lora_that_it_stood_beside(name: str, tmp_path: Path) -> None:
    """Whichever came first: a wrapper of PEFT's goes when it is merged, and must not take the nonlinear part along."""
    lora = LoraConfig(r=2, target_modules=["q_proj"] if name == "llama" else ["c_attn"], init_lora_weights=False)
    lora.fan_in_fan_out = name == "gpt2"
    model = get_peft_model(tiny(name), lora)
    hf.retrofit(model, freeze=False)
    for part in retrofitted(model).values():
        nn.init.normal_(part.post_gain)
    both = logits(model, name)
    merged = model.merge_and_unload()
    assert len(retrofitted(merged)) == 2
    assert_close(logits(merged, name), both, atol=1e-4, rtol=1e-4)

    first = tiny(name)
    hf.retrofit(first)
    for part in retrofitted(first).values():
        nn.init.normal_(part.post_gain)
    alone = logits(first, name)
    get_peft_model(first, lora)
    with pytest.warns(UserWarning, match="are not saved here, .*lora_A"):
        hf.save(first, tmp_path / "adapter")
    assert torch.equal(logits(hf.load(tmp_path / "adapter", tiny(name)), name), alone)
    wrapped = get_peft_model(tiny(name), lora)
    hf.load(tmp_path / "adapter", wrapped.base_model.model)
    with wrapped.disable_adapter():
        assert torch.equal(logits(wrapped, name), alone)
