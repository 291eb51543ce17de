"""Checkpoints of nanoGPT and of the authors: their own models' logits, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qurve.convert import load_checkpoint, model_config
from qurve.errors import BadInput
from qurve.model.config import ModelConfig
from qurve.projections import Bottleneck, Identity, Linear, Residual

FOLDER = Path(__file__).parent / "data" / "checkpoints"
CASES = sorted(file.stem for file in FOLDER.glob("*.pt"))

EXPECTED = {
    "nanogpt": {},
    "nanogpt-bias": {"bias": True},
    "nanogpt-compiled": {},
    "original": {},
    "original-scale-unstated": {"attention_scale": 0.125},  # what 64-wide heads would have; these are 8 wide
    "original-mlp-4.75": {"d_ff": 76},
    "identity": {"query": Identity(), "attention_scale": 8**-0.5 / 2, "tie_embeddings": False},
    "residual": {"query": Residual()},
    "residual-gelu": {"query": Bottleneck()},
    "residual-gelu-untied": {"query": Bottleneck(), "tie_embeddings": False},
    "residual-gelu-bias": {"query": Bottleneck(), "bias": True},
}


def read(case: str) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(FOLDER / f"{case}.pt", weights_only=True)
    return checkpoint


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[Any], Path]:
    def save(checkpoint: Any) -> Path:
        torch.save(checkpoint, tmp_path / "ckpt.pt")
        return tmp_path / "ckpt.pt"

    return save


# --------------------------------------------------------------------------------------------------------------- logits


def difference_from_theirs(file: Path, case: str) -> float:
    """The largest difference of the logits, over what is allowed."""
    reference = load_file(FOLDER / f"{case}.safetensors")
    with torch.no_grad():
        logits_BTV = load_checkpoint(file)(reference["ids"])
    allowed = 1e-5 * max(1.0, reference["logits"].abs().max().item())
    return (logits_BTV - reference["logits"]).abs().max().item() / allowed


@pytest.mark.parametrize("case", CASES)
def test_logits_are_theirs(case: str) -> None:
    assert difference_from_theirs(FOLDER / f"{case}.pt", case) <= 1


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_matters(case: str, saved: Callable[[Any], Path]) -> None:
    """Moving any one tensor of the file moves the logits: nothing is dropped, and the comparison can see it."""
    for key in read(case)["model"]:
        checkpoint = read(case)
        state = checkpoint["model"]
        changed = state[key] + 0.1 * torch.randn_like(state[key])
        if key.removeprefix("_orig_mod.") in ("lm_head.weight", "transformer.wte.weight") and EXPECTED[case].get(
            "tie_embeddings", True
        ):
            state |= {k: changed for k in state if k.endswith(("lm_head.weight", "transformer.wte.weight"))}
        state[key] = changed
        assert difference_from_theirs(saved(checkpoint), case) > 10, key


def test_every_case_is_expected() -> None:
    assert EXPECTED.keys() == set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_configuration_is_read(case: str) -> None:
    tiny = {"n_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 64, "context": 12, "vocab_size": 40}
    assert load_checkpoint(FOLDER / f"{case}.pt").config == ModelConfig(**{**tiny, **EXPECTED[case]})


def test_model_is_ready_for_use() -> None:
    model = load_checkpoint(os.fspath(FOLDER / "residual-gelu.pt"))
    assert not model.training
    assert all(p.requires_grad and p.is_contiguous() and p.dtype == torch.float32 for p in model.parameters())
    storages = [p.untyped_storage().data_ptr() for p in model.parameters()]
    assert len(set(storages)) == len(storages)
    assert all(p.untyped_storage().nbytes() == 4 * p.numel() for p in model.parameters())


def test_optimizer_half_precision_and_masks_are_no_obstacle(saved: Callable[[Any], Path]) -> None:
    checkpoint = read("nanogpt")
    parameters = [torch.nn.Parameter(tensor.clone()) for tensor in checkpoint["model"].values()]
    optimizer = torch.optim.AdamW(parameters)
    sum(p.sum() for p in parameters).backward()
    optimizer.step()
    checkpoint["optimizer"] = optimizer.state_dict()
    checkpoint["model"]["transformer.h.0.attn.bias"] = torch.ones(1, 1, 12, 12).tril()
    assert difference_from_theirs(saved(checkpoint), "nanogpt") <= 1
    checkpoint["model"] = {key: tensor.bfloat16() for key, tensor in checkpoint["model"].items()}
    assert {p.dtype for p in load_checkpoint(saved(checkpoint)).parameters()} == {torch.float32}


# -------------------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize("heads", ["n_head", "num_heads"], ids=["nanogpt", "authors"])
def test_dropout_is_kept_for_training_on(heads: str) -> None:
    assert model_config({heads: 12, "dropout": 0.2}).dropout == 0.2


def test_their_defaults_fill_what_is_not_stated() -> None:
    nano = {"n_layer": 12, "n_head": 12, "n_embd": 768}
    assert model_config(nano) == ModelConfig(bias=True)  # nanoGPT has biases unless told otherwise
    assert model_config({}) == ModelConfig()
    narrow = model_config({"n_embd": 384, "num_heads": 4})  # 96-wide heads: their defaults do not follow
    assert (narrow.d_ff, narrow.attention_scale) == (3072, 0.125)


@pytest.mark.parametrize(
    ("mode", "query", "stated", "resolved"),
    [
        ("original", Linear(), 0.125, None),
        ("original", Linear(), 0.0625, 0.0625),
        ("identity", Identity(), 0.0625, 0.0625),
        ("identity", Identity(), 0.125, None),
        ("residual", Residual(), 0.0625, None),
        ("residual", Residual(), 0.125, 0.25),
        ("residual_gelu", Bottleneck(), 0.0625, None),
        ("residual_gelu", Bottleneck(), 0.1, 0.2),
    ],
)
def test_stated_scale_is_honoured(mode: str, query: Any, stated: float, resolved: float | None) -> None:
    config = model_config({"query_mode": mode, "scale": stated})
    assert (config.query, config.attention_scale) == (query, resolved)


# ------------------------------------------------------------------------------------------------------------- refusals


class Code:
    def __reduce__(self) -> Any:
        return os.system, ("false",)


def test_code_is_refused_by_name(saved: Callable[[Any], Path]) -> None:
    file = saved({**read("nanogpt"), "config": Code()})
    with pytest.raises(BadInput, match=r"ckpt\.pt holds code besides weights \(posix\.system\)"):
        load_checkpoint(file)


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["model"].pop("transformer.h.1.ln_2.weight"), r"missing: transformer\.h\.1\.ln_2\.weight$"),
        (lambda c: c["model"].update(extra=torch.ones(2)), r"unexpected: extra$"),
        (
            lambda c: c["model"].update({"transformer.wpe.weight": torch.ones(12, 8)}),
            r"of another shape: transformer\.wpe\.weight \[12, 8\] instead of \[12, 16\]$",
        ),
        (
            lambda c: c["model"].update({"transformer.h.0.attn.c_attn.weight": torch.ones(48, 16)}),
            r"c_attn\.weight \[48, 16\] instead of \[32, 16\]$",
        ),
        (lambda c: c["model"].update({"lm_head.weight": torch.ones(40, 16)}), r"lm_head\.weight .* differ"),
        (lambda c: c["model"].update({"lm_head.weight": 3}), r"'lm_head\.weight' is no tensor but int"),
        (lambda c: c["model_args"].update(n_layer=3), r"missing: transformer\.h\.2\..* and 4 more"),
        (lambda c: c["model_args"].update(query_mode="residual_glu"), r"residual_glu.*residual_gelu"),
        (lambda c: c["model_args"].update(n_embd="16"), r"model_args\.n_embd = '16' is not a whole number"),
        (lambda c: c["model_args"].update(num_heads=3), r"does not divide into"),
        (lambda c: c["model_args"].update(num_heads=0), r"n_heads = 0"),
        (lambda c: c.pop("model_args"), r"it has no 'model_args'"),
        (lambda c: c.update(model=[1]), r"it has no 'model'"),
    ],
)
def test_what_does_not_fit_is_named(change: Change, message: str, saved: Callable[[Any], Path]) -> None:
    checkpoint = read("residual-gelu")
    change(checkpoint)
    with pytest.raises(BadInput, match=message) as caught:
        load_checkpoint(saved(checkpoint))
    assert "ckpt.pt" in str(caught.value)


def test_what_is_no_checkpoint_is_named(tmp_path: Path, saved: Callable[[Any], Path]) -> None:
    file = tmp_path / "notes.pt"
    with pytest.raises(BadInput, match=r"notes\.pt does not exist"):
        load_checkpoint(file)
    with pytest.raises(BadInput, match=r"is a folder; name the ckpt\.pt in it"):
        load_checkpoint(tmp_path)
    whole = (FOLDER / "nanogpt.pt").read_bytes()
    for content in (b"", b"some text", b"\x80\x02.", whole[: len(whole) // 2], b"PK\x05\x06" + bytes(18)):
        file.write_bytes(content)
        with pytest.raises(BadInput, match=r"notes\.pt is not a checkpoint that torch can read"):
            load_checkpoint(file)
    with pytest.raises(BadInput, match="it has no 'model'"):
        load_checkpoint(saved(torch.ones(2)))
