"""A retrofit in a folder: the same logits elsewhere, and never a plausible wrong model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_families import batch, tiny
from torch import nn

from processes import environment
from qurve import hf
from qurve.errors import BadInput
from qurve.files import write_manifest
from qurve.hf.part import parts
from qurve.projections import Bottleneck


def stirred(name: str = "llama", **options: object) -> nn.Module:
    model = tiny(name)
    hf.retrofit(model, Bottleneck(width=5, scale=0.7), **options)  # type: ignore[arg-type]
    with torch.no_grad():
        for part in parts(model).values():
            for p in part.parameters():
                p.add_(0.5 * torch.randn_like(p))
    return model


@torch.no_grad()
def logits(model: nn.Module, name: str = "llama") -> torch.Tensor:
    found: torch.Tensor = model(**batch(name)).logits
    return found


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, torch.Tensor]:
    model = stirred()
    hf.save(model, tmp_path / "adapter")
    return tmp_path / "adapter", logits(model)


@pytest.mark.parametrize(("name", "layers"), [("gpt2", "all"), ("gpt_neox", [1]), ("bert", "all")])
def test_into_a_fresh_instance(name: str, layers: object, tmp_path: Path) -> None:
    model = stirred(name, layers=layers)
    hf.save(model, tmp_path / "adapter")
    found = hf.load(tmp_path / "adapter", tiny(name).train())
    assert torch.equal(logits(found, name), logits(model, name))
    assert not found.training
    assert all(p.requires_grad == (".nonlinear." in n) for n, p in found.named_parameters())
    hf.restore(found)
    assert torch.equal(logits(found, name), logits(tiny(name), name))


def test_with_its_base_from_where_it_was(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    tiny("llama").to(torch.bfloat16).save_pretrained(tmp_path / "base")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager").eval()
    hf.retrofit(model)
    for part in parts(model).values():
        nn.init.normal_(part.post_gain)
    hf.save(model, tmp_path / "adapter")
    hf.save(model, tmp_path / "adapter")  # over itself
    found = hf.load(tmp_path / "adapter")
    assert (found.dtype, found.config._attn_implementation) == (torch.bfloat16, "eager")
    assert torch.equal(logits(found), logits(model))
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(BadInput, match=r"base model '.*base' cannot be loaded"):
        hf.load(tmp_path / "adapter")


@pytest.mark.slow
def test_in_a_new_process(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    tiny("llama").save_pretrained(tmp_path / "base")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "base").eval()
    hf.retrofit(model)
    for part in parts(model).values():
        nn.init.normal_(part.post_gain)
    hf.save(model, tmp_path / "adapter")
    code = (
        "import sys, torch; from qurve import hf; torch.set_num_threads(1); m = hf.load(sys.argv[1])\n"
        "with torch.no_grad(): torch.save(m(torch.tensor([[5, 9, 3]])).logits, sys.argv[2])"
    )
    out = tmp_path / "logits.pt"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "adapter"), str(out)], env=environment(), check=True)
    with torch.no_grad():
        assert torch.equal(torch.load(out), model(torch.tensor([[5, 9, 3]])).logits)


def test_what_was_folded_is_saved_folded(tmp_path: Path) -> None:
    model = stirred()
    hf.fold(model)
    hf.save(model, tmp_path / "adapter")
    assert torch.equal(logits(hf.load(tmp_path / "adapter", tiny("llama"))), logits(model))


def refused(said: str, folder: Path, model: nn.Module | None = None) -> None:
    model = tiny("llama") if model is None else model
    shown, flags = repr(model), [p.requires_grad for p in model.parameters()]
    with pytest.raises(BadInput, match=said):
        hf.load(folder, model)
    assert (repr(model), [p.requires_grad for p in model.parameters()]) == (shown, flags)


def test_missing_and_unexpected_weights_are_refused(saved: tuple[Path, torch.Tensor]) -> None:
    folder, _ = saved
    file = folder / "retrofit.safetensors"
    whole = load_file(file)
    first = "model.layers.0.self_attn.q_proj.w1"
    for said, changed in (
        (f"missing: {first} \\(1 in all\\)", {k: v for k, v in whole.items() if k != first}),
        (r"unexpected: extra \(1 in all\)", {**whole, "extra": torch.zeros(1)}),
        (f"of another shape: {first}", {**whole, first: whole[first][:2].clone()}),
    ):
        save_file(changed, file)
        refused("manifest|damaged", folder)
        write_manifest_anew(folder)
        refused(said, folder)


def write_manifest_anew(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    write_manifest(folder)


def test_a_folder_that_is_not_whole_is_refused(saved: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    folder, _ = saved
    weights = (folder / "retrofit.safetensors").read_bytes()
    (folder / "retrofit.safetensors").write_bytes(weights[:-9])
    refused("retrofit.safetensors is damaged", folder)
    (folder / "retrofit.safetensors").unlink()
    refused("retrofit.safetensors is missing", folder)
    (folder / "manifest.json").unlink()
    refused("manifest.json cannot be read", folder)
    refused("is no folder: there is no retrofit.json", tmp_path / "nothing")
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft" / "adapter_config.json").write_text("{}")
    refused("it is an adapter of PEFT", tmp_path / "peft")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 2}, "format 2 is not 1"),
        ({"kind": "something"}, "is not 1|is no description"),
        ({"layers": {}}, "is no description of a retrofit"),
        ({"config": {"kind": "bottleneck", "widht": 3}}, "unknown field 'config.widht'|widht"),
        ({"layers": {"model.layers.9.self_attn.q_proj": None}}, "has no layer model.layers.9"),
    ],
)
def test_another_description_is_refused(change: dict[str, object], said: str, saved: tuple[Path, torch.Tensor]) -> None:
    folder, _ = saved
    tree = json.loads((folder / "retrofit.json").read_text())
    (folder / "retrofit.json").write_text(json.dumps({**tree, **change}))
    write_manifest_anew(folder)
    refused(said, folder)


def test_another_base_is_refused(saved: tuple[Path, torch.Tensor]) -> None:
    folder, expected = saved
    other = tiny("llama")
    with torch.no_grad():
        other.model.layers[1].self_attn.q_proj.weight.normal_()
    refused("another base model: the weight of model.layers.1", folder, other)
    with torch.no_grad():
        (turned := tiny("llama")).model.layers[1].self_attn.q_proj.weight.neg_()  # of the same size
    refused("another base model: the weight of model.layers.1", folder, turned)
    refused("has no layer", folder, tiny("gpt2"))
    refused("retrofitted already", folder, stirred())
    half = hf.load(folder, tiny("llama").to(torch.bfloat16))  # the same base in another dtype
    assert (logits(half).float() - expected).abs().max() < 0.1 * expected.abs().max()


def test_a_base_that_nobody_named(saved: tuple[Path, torch.Tensor]) -> None:
    with pytest.raises(BadInput, match="does not say where its base model is"):
        hf.load(saved[0])


def test_a_save_that_was_killed_is_told_and_can_be_made_anew(
    saved: tuple[Path, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = saved

    def killed(path: Path, content: str) -> None:
        path.with_name(f".{path.name}.1.part").write_text(content[:9])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("qurve.hf.saving.write_atomic", killed)
        with pytest.raises(KeyboardInterrupt):
            hf.save(stirred(), folder)
    refused("manifest.json cannot be read", folder)
    hf.save(stirred(), folder)
    assert torch.equal(logits(hf.load(folder, tiny("llama"))), expected)
    assert not list(folder.glob(".*"))


def test_a_full_disk_leaves_the_save_that_was_there(
    saved: tuple[Path, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = saved

    def full(tensors: dict[str, torch.Tensor], file: Path) -> None:
        file.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr("qurve.hf.saving.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        hf.save(stirred(), folder)
    assert torch.equal(logits(hf.load(folder, tiny("llama"))), expected)
    monkeypatch.undo()
    another = stirred()
    hf.save(another, folder)
    assert torch.equal(logits(hf.load(folder, tiny("llama"))), logits(another))
    assert sorted(file.name for file in folder.iterdir()) == ["manifest.json", "retrofit.json", "retrofit.safetensors"]


def test_what_could_be_trained_is_kept(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="other parameters"):
        hf.save(stirred(freeze=False), tmp_path / "adapter")
    assert all(p.requires_grad for p in hf.load(tmp_path / "adapter", tiny("llama")).parameters())


def test_what_would_be_lost_is_said(tmp_path: Path) -> None:
    model = stirred(freeze=False)
    with pytest.warns(UserWarning, match="other parameters can be trained and are not saved here, model.embed_tokens"):
        hf.save(model, tmp_path / "adapter")
    with pytest.raises(BadInput, match="is not retrofitted"):
        hf.save(tiny("llama"), tmp_path / "other")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(BadInput, match="holds something else"):
        hf.save(stirred(), tmp_path / "full")
