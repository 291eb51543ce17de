from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from qurve.data.loader import TokenData
from qurve.errors import BadInput
from qurve.evaluate import Evaluated, Request, log_likelihoods, open_model
from qurve.evaluate import likelihood as module
from qurve.runfolder import RunFolder


def requests() -> list[Request]:
    """Of many lengths, most of them in a batch with longer ones; the last is too long for a context of 16."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 256, (40,), generator=draw).tolist()
    lengths = [(1, 1), (3, 2), (9, 7), (2, 11), (15, 1), (5, 5), (1, 8), (30, 6)]
    return [Request(ids[:a], ids[a : a + b]) for a, b in lengths]


def alone(model: Evaluated, request: Request) -> tuple[float, bool]:
    """The definition, without a batch, padding, or logits that are left out."""
    ids = [*request.context, *request.continuation]
    ids = ids[max(0, len(ids) - 1 - model.context) :]
    inputs = torch.tensor([ids[:-1]])
    logits = model.logits(inputs, torch.tensor([inputs.shape[1]]), 0)[0].float()
    n = len(request.continuation)
    nats = logits.log_softmax(-1)[range(len(ids) - 1 - n, len(ids) - 1), ids[-n:]].sum()
    return nats.item(), logits[-n:, : model.n_ids].argmax(-1).tolist() == ids[-n:]


@pytest.mark.parametrize("name", ["ours", "gpt2", "llama"])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_the_size_of_a_batch_has_no_part_in_the_numbers(
    name: str, batch_size: int, ours: Evaluated, hugging_face: dict[str, Path]
):
    model = ours if name == "ours" else open_model(hugging_face[name], device="cpu")
    found = log_likelihoods(model, requests(), batch_size=batch_size)
    expected = [alone(model, request) for request in requests()]
    assert [one.log_likelihood for one in found] == pytest.approx([nats for nats, _ in expected], abs=2e-5)
    assert [one.greedy for one in found] == [greedy for _, greedy in expected]
    assert [one.cut for one in found] == [max(0, 35 - model.context) if i == 7 else 0 for i in range(8)]


def test_what_is_greedy_is_what_the_model_would_say(ours: Evaluated):
    context = [65, 66, 67]
    for _ in range(4):
        logits = ours.logits(torch.tensor([context]), torch.tensor([len(context)]), len(context) - 1)
        context.append(int(logits[0, 0, : ours.n_ids].argmax()))
    right, wrong = Request(context[:3], context[3:]), Request(context[:3], [*context[3:6], context[6] ^ 1])
    assert [one.greedy for one in log_likelihoods(ours, [wrong, right])] == [False, True]


def test_rows_that_pad_a_vocabulary_are_likely_and_never_the_likeliest():
    logits_V = torch.tensor([0.0, 1.0, 2.0, 5.0])

    class Padded(Evaluated):
        name, context, n_ids, end = "padded", 8, 3, 0
        encode = continued = None  # type: ignore[assignment]

        def logits(self, ids_BT: torch.Tensor, lengths_B: torch.Tensor, first: int) -> torch.Tensor:
            return logits_V.expand(*ids_BT.shape, 4)[:, first:]

    (found,) = log_likelihoods(Padded(), [Request([0], [2])])
    assert found.greedy
    assert found.log_likelihood == pytest.approx(logits_V.log_softmax(0)[2].item())


@pytest.mark.parametrize("name", ["ours", "llama"])
def test_products_are_as_precise_as_they_are_asked_to_be(
    name: str, undisturbed: RunFolder, little: TokenData, hugging_face: dict[str, Path]
):
    place = undisturbed.path if name == "ours" else hugging_face[name]
    data = little.folder if name == "ours" else None
    whole, half = (open_model(place, data=data, device="cpu", precision=p) for p in ("float32", "bf16"))
    one, other = (log_likelihoods(model, requests()[:4]) for model in (whole, half))
    apart = [abs(a.log_likelihood - b.log_likelihood) for a, b in zip(one, other, strict=True)]
    assert 1e-4 < max(apart) < 0.1 * abs(min(a.log_likelihood for a in one))


def test_few_logits_at_a_time(ours: Evaluated, monkeypatch: pytest.MonkeyPatch):
    expected = [one.log_likelihood for one in log_likelihoods(ours, requests())]
    monkeypatch.setattr(module, "MOST_LOGITS", 1)
    sizes: list[int] = []
    found = log_likelihoods(ours, requests(), progress=sizes.append)
    assert sizes == list(range(1, 9))
    assert [one.log_likelihood for one in found] == pytest.approx(expected, abs=2e-5)


def test_a_continuation_that_does_not_fit_is_refused(ours: Evaluated):
    for request in (Request([1], []), Request([], [1]), Request([1], [2] * (ours.context + 1))):
        with pytest.raises(BadInput, match="request 0: a context of"):
            log_likelihoods(ours, [request])
    assert log_likelihoods(ours, [Request([1, 2], [3] * ours.context)])[0].cut == 1


# --------------------------------------------------------------------------------------------------------------- models


def test_a_hugging_face_text_begins_as_its_tokenizer_has_it(hugging_face: dict[str, Path]):
    gpt2, llama = (open_model(hugging_face[name], device="cpu") for name in ("gpt2", "llama"))
    assert (gpt2.start, gpt2.first, gpt2.end, gpt2.context) == (None, 256, 256, 24)
    assert (llama.start, llama.first, llama.end) == (257, 257, 256)
    assert (gpt2.n_ids, llama.n_ids) == (258, 258)  # of 264 rows
    assert llama.encode(["ab"]) == gpt2.encode(["ab"])
    assert len(llama.encode(["ab"])[0]) == 2


def test_folders_that_hold_no_whole_causal_model_are_refused(
    tmp_path: Path, undisturbed: RunFolder, hugging_face: dict[str, Path]
):
    with pytest.raises(BadInput, match=r"missing does not exist; give a run's folder"):
        open_model(tmp_path / "missing")
    with pytest.raises(BadInput, match=r"holds no model: it is neither a run's folder"):
        open_model(tmp_path)
    from safetensors.torch import load_file, save_file

    half = tmp_path / "half"
    half.mkdir()
    for file in hugging_face["gpt2"].iterdir():
        (half / file.name).write_bytes(file.read_bytes())
    weights = load_file(half / "model.safetensors")
    weights.pop("transformer.h.1.attn.c_attn.weight")
    file = half / "model.safetensors"
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(BadInput, match=r"half .*missing keys: transformer.h.1.attn.c_attn.weight"):
        open_model(half)
    save_file({**load_file(hugging_face["gpt2"] / "model.safetensors"), "more": torch.zeros(1)}, file, {"format": "pt"})
    with pytest.raises(BadInput, match=r"half .*unexpected keys: more"):
        open_model(half)
    save_file(load_file(hugging_face["gpt2"] / "model.safetensors"), half / "model.safetensors", {"format": "pt"})
    for file in half.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(BadInput, match=r"half holds no tokenizer, or one that makes nothing"):
        open_model(half)
    (half / "model.safetensors").unlink()
    with pytest.raises(BadInput, match=r"half cannot be loaded by transformers"):
        open_model(half)


def test_a_folders_own_code_is_not_run_and_not_asked_about(
    tmp_path: Path, hugging_face: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "own"
    folder.mkdir()
    for file in hugging_face["gpt2"].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tree = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps({**tree, "model_type": "own", "auto_map": own}))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setattr("builtins.input", lambda _: "y")
    with pytest.raises(BadInput, match="own cannot be loaded by transformers"):
        open_model(folder)
    assert not (tmp_path / "ran").exists()


def altered(source: Path, folder: Path, **changes: object) -> Path:
    """A copy of a model's folder whose model has another configuration, and random weights."""
    transformers = pytest.importorskip("transformers")
    shutil.copytree(source, folder)
    config = transformers.AutoConfig.from_pretrained(source, **changes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_a_model_that_sees_the_tokens_to_come_is_refused(hugging_face: dict[str, Path], tmp_path: Path):
    """Its likelihoods would be plausible, and of tokens that it was shown."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=264, initializer_range=0.5, **sizes)
    shutil.copytree(hugging_face["gpt2"], tmp_path / "bert")
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    from qurve.hf import QurveConfig, QurveForCausalLM
    from qurve.model.config import ModelConfig

    for attends in ("bidirectional", "prefix"):
        own = ModelConfig(1, 32, 2, d_ff=48, context=24, vocab_size=264, attends=attends)  # type: ignore[arg-type]
        shutil.copytree(hugging_face["gpt2"], tmp_path / attends)
        QurveForCausalLM(QurveConfig(qurve=own)).save_pretrained(tmp_path / attends)
        with pytest.raises(BadInput, match=f"the model attends {attends}; likelihoods of text take a causal one"):
            open_model(tmp_path / attends, device="cpu")
    with pytest.raises(BadInput, match="the model attends to tokens that are still to come"):
        open_model(tmp_path / "bert", device="cpu")


def test_a_tokenizer_of_another_model_is_refused(hugging_face: dict[str, Path], tmp_path: Path):
    with pytest.raises(BadInput, match="gives the id 256, and its model knows ids below 200; they do not belong"):
        open_model(altered(hugging_face["gpt2"], tmp_path / "small", vocab_size=200), device="cpu")
    model = open_model(altered(hugging_face["gpt2"], tmp_path / "less", vocab_size=257), device="cpu")
    with pytest.raises(BadInput, match="gives the id 257"):
        model.encode(["a", "a <s>"])


def test_the_likeliest_continuation_ends_at_a_stop_text(ours: Evaluated, hugging_face: dict[str, Path]):
    for model in (ours, open_model(hugging_face["gpt2"], device="cpu")):
        (ids,) = model.encode(["To the"])
        text = model.continued(ids, 6, [])
        assert 0 < len(text) <= 6
        again = [*ids]
        for _ in range(6):
            logits = model.logits(torch.tensor([again]), torch.tensor([len(again)]), len(again) - 1)
            again.append(int(logits[0, 0, : model.n_ids].argmax()))
        assert model.encode([text])[0] == again[len(ids) :] or "�" in text or model.end in again[len(ids) :]
        assert model.continued(ids, 6, [text[1]]) == text[: text.index(text[1])]
