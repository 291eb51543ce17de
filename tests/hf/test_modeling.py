"""Our models as Hugging Face models: the same numbers, whatever they are made of and whoever asks."""

from __future__ import annotations

import copy
import tomllib
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, QuantizedCache, StaticCache

from combinations import LENGTH, VOCABULARY, Row, config_of, covering_array, words
from commands import ROOT
from qurve.errors import BadInput
from qurve.generate import Sampling, generate
from qurve.hf import QurveConfig, QurveForCausalLM
from qurve.hf.modeling import attend_as
from qurve.model.config import LayerOverride, ModelConfig
from qurve.model.feed_forward import MixtureOfExperts
from qurve.model.gpt import GPT
from qurve.model.positions import Rope
from qurve.projections import Bottleneck
from qurve.zoo.linear_attention import LinearAttention
from qurve.zoo.mlp_attention import MLPAttention
from qurve.zoo.primer import Primer

ROWS = covering_array()[0]
every_row = pytest.mark.parametrize("row", ROWS, ids=[f"{i}-{words(row)}" for i, row in enumerate(ROWS)])
SMALL: dict[str, Any] = {"n_layers": 3, "d_model": 24, "n_heads": 2, "d_ff": 40, "context": 48, "vocab_size": 31}
MIXERS = {
    "softmax": ModelConfig(**SMALL, query=Bottleneck(), positions=Rope()),
    "linear": ModelConfig(**SMALL, query=Bottleneck(), mixer=LinearAttention()),
    "mlp": ModelConfig(**SMALL, mixer=MLPAttention()),
    "primer": ModelConfig(**SMALL, query=Bottleneck(), mixer=Primer()),
}


def hub_of(config: ModelConfig) -> QurveForCausalLM:
    """A model whose every parameter matters."""
    model, generator = QurveForCausalLM(QurveConfig(qurve=config)).eval(), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            spread = p.std(correction=0) if p.dim() > 1 else 0.0
            p.add_((0.3 * spread or 0.1) * torch.randn(p.shape, generator=generator))
    return model


def plain(model: QurveForCausalLM) -> GPT:
    """The same weights in a model of ours that nothing was done to."""
    own = GPT(model.config.model, seed=7)
    own.load_state_dict(model.gpt.state_dict())
    return own.eval()


def tokens(length: int = LENGTH, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(vocabulary, (2, length), generator=torch.Generator().manual_seed(1))


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Within 1e-5, of the largest logit where that is above one."""
    assert_close(found, expected, atol=1e-5 * max(1.0, expected.abs().max().item()), rtol=0)


# -------------------------------------------------------------------------------------------------- every combination


@every_row
@torch.no_grad()
def test_forward_is_the_models_own(row: Row) -> None:
    """Whole, in another way of attention, and in pieces from a cache of theirs; the second text is padded."""
    hub, pad = hub_of(config_of(row)), 9
    own, ids_BT, mask = plain(hub), tokens(), torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, :pad] = 0
    attends = own.config.attends
    theirs = {"prefix_lengths": torch.tensor([17, pad + 5])} if attends == "prefix" else {}
    ours = {"prefix_B": torch.tensor([17, pad + 5])} if attends == "prefix" else {}
    expected = own(ids_BT, padding_B=torch.tensor([0, pad]), **ours)
    assert torch.equal(hub(ids_BT, attention_mask=mask, use_cache=False, **theirs).logits, expected)
    hub.set_attn_implementation("eager")
    assert_same(hub(ids_BT, attention_mask=mask, use_cache=False, **theirs).logits[mask.bool()], expected[mask.bool()])
    hub.set_attn_implementation("sdpa")
    if attends == "bidirectional":
        assert hub(ids_BT).cache is None
        return
    for cache in DynamicCache(config=hub.config), StaticCache(config=hub.config, max_cache_len=LENGTH + 7):
        parts, end = [], 0
        for part in ids_BT.split([40, 20, 1, 1, 1], dim=1):
            first = theirs if end == 0 else {}
            end += part.shape[1]
            told = {"attention_mask": mask[:, :end], "cache": cache, **first}
            parts.append(hub(part, **told).logits)
        assert_same(torch.cat(parts, dim=1)[mask.bool()], expected[mask.bool()])


@every_row
def test_configuration_and_weights_come_back(row: Row) -> None:
    config = QurveConfig(qurve=config_of(row))
    again = QurveConfig.from_dict(config.to_diff_dict())
    assert again.model == config.model == config_of(row)
    assert again.vocab_size == VOCABULARY
    assert again.num_hidden_layers == config.model.n_layers


# ---------------------------------------------------------------------------------------------------------- generation


@pytest.mark.parametrize("name", MIXERS)
def test_every_cache_generates_what_ours_does(name: str) -> None:
    hub = hub_of(MIXERS[name])
    own, ids_BT = plain(hub), tokens(12, 31)
    mask = torch.ones_like(ids_BT)
    mask[1, :4] = 0
    prompts = [ids_BT[0].tolist(), ids_BT[1, 4:].tolist()]
    made = generate(own, prompts, sampling=Sampling(temperature=0), max_new_tokens=20)
    expected = torch.tensor([one.ids for one in made])
    asked: dict[str, Any] = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    ways: list[dict[str, Any]] = [{}, {"use_cache": False}, {"cache": DynamicCache()}, {"prefill_chunk_size": 5}]
    ways += [{"cache_implementation": "static"}, {"cache_implementation": "static", "prefill_chunk_size": 5}]
    for way in ways:
        assert torch.equal(hub.generate(ids_BT, **asked, **way)[:, 12:], expected), way
    beams = hub.generate(ids_BT, **asked, num_beams=3)
    assert torch.equal(beams, hub.generate(ids_BT, **asked, num_beams=3, use_cache=False))
    several = hub.generate(ids_BT, **{**asked, "do_sample": True}, num_return_sequences=2)
    assert several.shape == (4, 32)


@pytest.mark.parametrize("name", MIXERS)
@torch.no_grad()
def test_a_quantised_cache_holds_what_is_keys_and_values(name: str) -> None:
    """In eight bits logits move a little; a state of ours is no part of it."""
    hub, ids_BT = hub_of(MIXERS[name]), tokens(20, 31)
    cache = QuantizedCache("fp8", config=hub.config)
    found = torch.cat([hub(part, cache=cache).logits for part in ids_BT.split([12, 5, 1, 1, 1], dim=1)], dim=1)
    expected = hub(ids_BT, use_cache=False).logits
    assert cache.get_seq_length() == 20
    if name != "softmax":
        assert_same(found, expected)
        return
    assert cache.layers[2]._quantized_keys[0].dtype == torch.float8_e4m3fn
    assert_same(found[:, :12], expected[:, :12])
    change = (found - expected).norm() / expected.norm()
    assert 1e-4 < change < 0.05
    asked: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20, "num_beams": 3}
    fp8 = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    assert hub.generate(ids_BT[:, :12], **asked, **fp8).shape == (2, 32)


MIXED = ModelConfig(**SMALL, overrides=(LayerOverride((1,), mixer=LinearAttention()),))


@pytest.mark.parametrize(
    ("config", "way", "said"),
    [
        (MIXERS["softmax"], "offloaded", "takes keys and values off a GPU, and this model is on the cpu"),
        (MIXERS["softmax"], "offloaded_static", "takes keys and values off a GPU, and this model is on the cpu"),
        (MIXED, "offloaded", "block 1 keeps another state"),
        (MIXERS["softmax"], "paged", "this model has an attention of its own: use generate"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(config: ModelConfig, way: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        hub_of(config).generate(tokens(12, 31), max_new_tokens=2, cache_implementation=way)


def test_a_prefix_model_takes_its_prompt_for_the_prefix() -> None:
    hub = hub_of(ModelConfig(**SMALL, attends="prefix"))
    ids_BT = tokens(12, 31)
    made = generate(plain(hub), ids_BT.tolist(), sampling=Sampling(temperature=0), max_new_tokens=8)
    found = hub.generate(ids_BT, do_sample=False, max_new_tokens=8)
    assert found[:, 12:].tolist() == [list(one.ids) for one in made]
    with pytest.raises(BadInput, match="give prefix_lengths"):
        hub.generate(ids_BT, do_sample=False, max_new_tokens=8, use_cache=False)
    given = {"prefix_lengths": torch.tensor([12, 12])}
    again = hub.generate(ids_BT, do_sample=False, max_new_tokens=8, use_cache=False, **given)
    assert torch.equal(again, found)
    given = {"prefix_lengths": torch.tensor([1, 3])}
    told = {"return_dict_in_generate": True, "output_logits": True}
    made = hub.generate(ids_BT, do_sample=False, max_new_tokens=1, **given, **told)
    with torch.no_grad():
        assert_same(made.logits[0], hub(ids_BT, **given).logits[:, -1])


@pytest.mark.parametrize("name", ["linear", "primer"])
def test_a_state_that_is_no_list_of_tokens_is_not_cropped(name: str) -> None:
    hub = hub_of(MIXERS[name])
    with torch.no_grad():
        cache = hub(tokens(9, 31)).cache
    assert not cache.is_croppable
    with pytest.raises(ValueError, match="cannot be set back"):
        cache.crop(-1)


@torch.no_grad()
def test_values_alone_are_cropped() -> None:
    hub, ids_BT = hub_of(MIXERS["mlp"]), tokens(9, 31)
    cache = hub(ids_BT).cache
    cache.crop(-3)
    assert_same(hub(ids_BT[:, 6:], cache=cache).logits, hub(ids_BT, use_cache=False).logits[:, 6:])


@pytest.mark.parametrize("name", MIXERS)
@torch.no_grad()
def test_a_cache_is_repeated_chosen_from_and_reset(name: str) -> None:
    hub, ids_BT = hub_of(MIXERS[name]), tokens(9, 31)
    expected = hub(ids_BT, use_cache=False).logits[:, -1]
    cache = hub(ids_BT[:, :8]).cache
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 2, 3]))
    rows = torch.tensor([0, 1, 1])
    assert_same(hub(ids_BT[rows, 8:], cache=cache).logits[:, -1], expected[rows])
    cache.reset()
    if name != "softmax":  # (transformers' own layers keep room for as many texts)
        hub(ids_BT[:1, :8], cache=cache)
        assert_same(hub(ids_BT[:1, 8:], cache=cache).logits[:, -1], expected[:1])


# ------------------------------------------------------------------------------------------------------------ training


@pytest.mark.parametrize("attends", ["causal", "bidirectional"])
def test_loss_of_labels_is_ours(attends: Any) -> None:
    hub = hub_of(ModelConfig(**SMALL, attends=attends, mlp=MixtureOfExperts(3, 2, balance=0.5)))
    own, ids_BT = plain(hub), tokens(20, 31)
    labels = ids_BT.clone()
    labels[:, 3:6] = -100  # (the first one is no target of a causal model)
    own.train()
    hub.train()
    if attends == "causal":
        shifted = torch.cat([labels[:, 1:], torch.full((2, 1), -100)], dim=1)
        expected, counted = own.loss(ids_BT, shifted), (shifted != -100).sum()
    else:
        expected, counted = own.loss(ids_BT, labels), (labels != -100).sum()
    assert_close(hub(ids_BT, labels=labels).loss, expected)
    in_parts = [
        hub(ids_BT, labels=labels, num_items_in_batch=2 * counted).loss,
        hub(ids_BT, labels=labels, num_items_in_batch=2 * int(counted)).loss,
    ]
    assert_close(sum(in_parts), expected)
    hub.eval()
    assert hub(ids_BT, labels=labels).loss < expected  # no balance


def test_gradient_checkpointing_keeps_the_gradients() -> None:
    hub = hub_of(ModelConfig(**SMALL, query=Bottleneck(), mlp=MixtureOfExperts(3, 2))).train()
    ids_BT, gradients = tokens(20, 31), []
    for way in (hub.activation_checkpointing_disable, hub.activation_checkpointing_enable):
        way()
        hub.zero_grad()
        hub(ids_BT, labels=ids_BT).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in hub.named_parameters() if p.grad is not None})
    assert hub.is_activation_checkpointing
    assert len(gradients[0]) == len(list(hub.parameters()))
    for name, gradient in gradients[0].items():
        assert_close(gradients[1][name], gradient, msg=name)
    assert all("forward" in vars(block) for block in hub.gpt.blocks)
    hub._set_gradient_checkpointing(every_n_layers=2)
    assert ["forward" in vars(block) for block in hub.gpt.blocks] == [True, False, True]
    hub.activation_checkpointing_disable()
    assert not any("forward" in vars(block) for block in hub.gpt.blocks)


def test_checkpointing_has_no_place_for_a_filled_cache() -> None:
    """It is not made, and one that holds tokens already would be dropped, and its tokens not seen."""
    hub, ids_BT = hub_of(MIXERS["softmax"]), tokens(9, 31)
    with torch.no_grad():
        cache = hub(ids_BT).cache
    hub.train().activation_checkpointing_enable()
    assert hub(ids_BT, use_cache=True, cache=DynamicCache()).cache is None
    with pytest.raises(BadInput, match="a cache with tokens in it"):
        hub(ids_BT, cache=cache)


@torch.no_grad()
def test_logits_of_some_tokens_alone() -> None:
    hub, ids_BT = hub_of(MIXERS["softmax"]), tokens(9, 31)
    whole = hub(ids_BT).logits
    assert_same(hub(ids_BT, logits_to_keep=2).logits, whole[:, -2:])
    assert_same(hub(ids_BT, logits_to_keep=torch.tensor([1, 4])).logits, whole[:, [1, 4]])


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # torch's own, of its compiler
def test_flex_attention_is_the_same() -> None:
    config = ModelConfig(**{**SMALL, "d_model": 64}, query=Bottleneck(), window=9, attention_softcap=5.0)
    hub, ids_BT = hub_of(config), tokens(20, 31)
    mask = torch.ones_like(ids_BT)
    mask[1, :4] = 0
    with torch.no_grad():
        expected = hub(ids_BT, attention_mask=mask).logits[mask.bool()]
        hub.set_attn_implementation("flex_attention")
        assert_same(hub(ids_BT, attention_mask=mask).logits[mask.bool()], expected)


# ------------------------------------------------------------------------------------------------- masks and embeddings


@torch.no_grad()
def test_padding_at_the_right_is_not_seen() -> None:
    for attends in ("causal", "bidirectional"):
        hub, ids_BT = hub_of(ModelConfig(**SMALL, attends=attends)), tokens(20, 31)  # type: ignore[arg-type]
        mask = torch.ones_like(ids_BT)
        mask[1, 15:] = 0
        found = hub(ids_BT, attention_mask=mask, use_cache=False).logits
        assert_same(found[1, :15], hub(ids_BT[1:, :15]).logits[0])
        visible = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril().float()
        additive = torch.zeros(1, 1, 20, 20).masked_fill(visible == 0, -torch.inf)
        causal = hub_of(ModelConfig(**SMALL))
        assert_same(causal(ids_BT, attention_mask=additive, use_cache=False).logits, causal(ids_BT).logits)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"attention_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])}, "padding between real tokens"),
        ({"attention_mask": torch.ones(2, 3)}, r"shape \[2, 3\]"),
        ({"attention_mask": torch.ones(1, 1, 4, 4).tril(), "use_cache": False}, "0 where a token is seen"),
        ({"attention_mask": torch.ones(1, 2, 4, 4).bool(), "use_cache": False}, "for all heads alike"),
        ({"position_ids": torch.tensor([[0, 1, 0, 1]])}, "not those that this model counts"),
        ({"position_ids": torch.tensor([[0, 1, 2, 3, 4]])}, "not those that this model counts"),
        ({"inputs_embeds": torch.ones(2, 4, 24)}, "no inputs_embeds"),
        ({"output_attentions": True}, "does not hand them out"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        hub_of(ModelConfig(**SMALL))(tokens(4, 31), **given)


def test_padding_behind_tokens_of_a_cache_is_refused() -> None:
    hub, ids_BT = hub_of(ModelConfig(**SMALL)), tokens(6, 31)
    mask = torch.ones_like(ids_BT)
    mask[1, 5:] = 0
    with torch.no_grad(), pytest.raises(BadInput, match="goes on from a cache; pad at the left"):
        hub(ids_BT[:, 4:], cache=hub(ids_BT[:, :4]).cache, attention_mask=mask)


@pytest.mark.parametrize("way", ["sdpa", "eager"])
def test_attention_drops_out(way: str) -> None:
    config = QurveConfig(qurve=ModelConfig(**SMALL), attn_implementation=way)
    q, k, v = torch.randn(3, 2, 2, 9, 12).unbind()
    told: dict[str, Any] = {"mask": (None, True), "scale": 0.3}
    whole, dropped = attend_as(config, q, k, v, **told), attend_as(config, q, k, v, dropout=0.5, **told)
    assert config._attn_implementation == way
    assert (whole - dropped).abs().max() > 0.1


def test_a_bidirectional_model_does_not_generate() -> None:
    with pytest.raises(BadInput, match="sees the tokens to come"):
        hub_of(ModelConfig(**SMALL, attends="bidirectional")).generate(tokens(4, 31), max_new_tokens=2)


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_tied_and_resized(tied: bool) -> None:
    hub = hub_of(ModelConfig(**SMALL, tie_embeddings=tied))
    assert (hub.get_output_embeddings() is None) == tied
    before = hub(tokens(9, 31)).logits
    hub.resize_token_embeddings(40, mean_resizing=False)
    after = hub(tokens(9, 31)).logits
    assert after.shape[-1] == hub.config.vocab_size == hub.gpt.config.vocab_size == 40
    assert_same(after[..., :31], before)


# ------------------------------------------------------------------------------------------------------ what they load


def test_auto_classes_know_it_and_half_a_checkpoint_is_refused(tmp_path: Any) -> None:
    hub, ids_BT = hub_of(MIXERS["softmax"]), tokens(9, 31)
    hub.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is QurveConfig
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(read) is QurveForCausalLM
    assert torch.equal(read(ids_BT).logits, hub(ids_BT).logits)
    half = {name: p for name, p in hub.state_dict().items() if "blocks.1." not in name}
    hub.save_pretrained(tmp_path, state_dict=half)
    with pytest.raises(BadInput, match=r"missing: gpt\.blocks\.1"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    hub.save_pretrained(tmp_path, state_dict={**hub.state_dict(), "gpt.more": torch.zeros(1)})
    with pytest.raises(BadInput, match=r"unexpected: gpt\.more"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_config(hub.config).config.model == hub.config.model
    narrow = AutoModelForCausalLM.from_config(copy.deepcopy(hub.config)).bfloat16()
    assert narrow(ids_BT).logits.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"model_type": "llama", "hidden_size": 8}, "configuration of a 'llama' model"),
        ({"model_type": "qurve", "qurve": {"format": 9}}, "not a model configuration of format 1"),
        ({"model_type": "qurve", "qurve": {"format": 1, "d_modl": 9}}, "d_modl"),
    ],
)
def test_another_configuration_is_refused(tree: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        QurveConfig.from_dict(tree)


def test_an_older_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Down to one minor version lower it imports, and calls a cache by another name."""
    older = types.SimpleNamespace(__dataclass_fields__={"past_key_values": None})
    monkeypatch.setattr("qurve.hf.modeling.CausalLMOutputWithPast", older)
    with pytest.raises(BadInput, match=r"needs transformers 5\.24 or newer, and this is"):
        hub_of(ModelConfig(**SMALL))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "transformers>=5.24" in project["optional-dependencies"]["hf"]
