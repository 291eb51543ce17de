from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from qurve.data.loader import TokenData
from qurve.errors import BadInput
from qurve.evaluate import Evaluated, Loss, open_model, split_loss, text_loss
from qurve.evaluate import loss as module
from qurve.evaluate.loss import spans
from qurve.runfolder import RunFolder
from qurve.study.documents import document_losses


@pytest.mark.parametrize(("count", "context", "stride"), [(1, 4, 4), (2, 4, 1), (5, 4, 4), (6, 4, 4), (30, 8, 3)])
def test_every_token_but_the_first_is_a_target_once(count: int, context: int, stride: int):
    found = list(spans(count, context, stride))
    assert [place for _, done, end in found for place in range(done, end)] == list(range(1, count))
    for begin, done, end in found:
        assert end - 1 - begin <= context
        assert begin == 0 or done - begin > context - stride  # so many tokens each target may look back on


def plain(model: Evaluated, ids: list[int], stride: int) -> float:
    """Nats of the tokens after the first: each one alone, after the tokens that its window holds."""
    total = 0.0
    for begin, done, end in spans(len(ids), model.context, stride):
        for place in range(done, end):
            logits = model.logits(torch.tensor([ids[begin:place]]), torch.tensor([place - begin]), place - begin - 1)
            total -= logits[0, 0].float().log_softmax(-1)[ids[place]].item()
    return total


@pytest.mark.parametrize("stride", [16, 5])
def test_a_text_is_scored_token_by_token_after_the_id_that_begins_it(ours: Evaluated, stride: int):
    texts = ["Fellow-Citizens of the Senate, naïve", "", "a"]
    found = text_loss(ours, texts, stride=stride, batch_size=3)
    assert (found.tokens, found.n_bytes, found.documents) == (38, 38, 3)
    expected = sum(plain(ours, [256, *ids], stride) for ids in ours.encode(texts))
    assert found.nats == pytest.approx(expected, rel=1e-6)
    assert found.loss == pytest.approx(expected / 38)
    assert found.bits_per_byte == pytest.approx(found.loss / math.log(2))  # a byte is a token here
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert (found.context, found.stride) == (16, stride)


def test_units_are_bits_of_bytes_and_nats_of_tokens() -> None:
    loss = Loss(nats=60.0, tokens=20, n_bytes=50, documents=1, context=16, stride=16)
    assert (loss.loss, loss.perplexity) == (3.0, pytest.approx(math.exp(3)))
    assert loss.bits_per_byte == pytest.approx(60 / math.log(2) / 50)


def test_a_text_begins_as_its_tokenizer_has_it(hugging_face: dict[str, Path]):
    model = open_model(hugging_face["llama"], device="cpu")
    assert model.first != model.end
    (ids,) = model.encode(["Fellow-Citizens"])
    assert text_loss(model, ["Fellow-Citizens"]).nats == pytest.approx(plain(model, [model.first, *ids], 24), rel=1e-6)


def test_a_longer_look_back_is_worth_something_and_stated(ours: Evaluated, little: TokenData):
    losses = {stride: split_loss(ours, little, "train", stride=stride) for stride in (16, 4)}
    assert losses[16].tokens == losses[4].tokens
    assert losses[16].nats != losses[4].nats
    assert losses[4].to_json()["stride"] == 4


def test_a_split_has_the_loss_that_its_documents_add_up_to(
    ours: Evaluated, undisturbed: RunFolder, little: TokenData, monkeypatch: pytest.MonkeyPatch
):
    found = split_loss(ours, little, "train")
    documents = document_losses(undisturbed.path, little, "train", device="cpu")
    assert found.tokens == documents.tokens_D.sum() == len(little.split("train")) - 1
    assert found.nats == pytest.approx(documents.nats_D.sum(), rel=1e-6)
    ids = np.concatenate([part[0] for part in little.split("train").windows(np.array([1]), found.tokens - 1)])
    text = len(little.split("train")) - 1 - int((ids[1:] == 256).sum()) - int(ids[0] == 256)
    assert abs(found.n_bytes - text) <= 1
    monkeypatch.setattr(module, "MOST_WAITING", 40)  # two windows at a time
    parts: list[int] = []
    again = split_loss(ours, little, "train", progress=parts.append)
    assert len(parts) > 2
    assert parts[-1] == found.tokens
    assert (again.nats, again.n_bytes) == (pytest.approx(found.nats, rel=1e-6), found.n_bytes)


def test_numbers_that_do_not_fit_are_refused(ours: Evaluated):
    for options, said in (
        ({"context": 17}, "context 17: .* reads 1 to 16 tokens"),
        ({"context": 8, "stride": 9}, "stride 9: it must be 1 to the context, 8"),
        ({"stride": 0}, "stride 0"),
    ):
        with pytest.raises(BadInput, match=said):
            text_loss(ours, ["text"], **options)
    with pytest.raises(BadInput, match="all documents are empty"):
        text_loss(ours, [""])
