from __future__ import annotations

import numpy as np
import pytest
import torch

from qurve.config import apply_settings
from qurve.data.loader import TokenData
from qurve.errors import BadInput
from qurve.model.gpt import GPT
from qurve.runfolder import RunFolder
from qurve.study import documents
from qurve.study.documents import by_document, document_bootstrap, document_losses
from tiny import TINY

END = 256


# ------------------------------------------------------------------------------------------------------------ documents


def test_losses_are_summed_by_the_document_that_a_target_stands_in():
    nats = np.arange(7.0)
    found = by_document(nats, np.array([5, END, 6, 7, END, END, 8]), END)
    assert found.nats_D.tolist() == [0 + 1, 2 + 3 + 4, 5, 6]
    assert found.tokens_D.tolist() == [2, 3, 1, 1]


def test_a_runs_documents_add_up_to_its_plain_loss(undisturbed: RunFolder, little: TokenData):
    found = document_losses(undisturbed.path, little, "train", device="cpu")
    split, model = little.split("train"), GPT.from_run(undisturbed.path)
    context = model.config.context
    assert found.tokens_D.sum() == len(split) - 1
    inputs, targets = split.windows(np.arange(0, len(split) - context, context), context)
    with torch.no_grad():
        plain = model.loss(torch.from_numpy(inputs), torch.from_numpy(targets)).item()
    rest = (len(split) - 1) % context
    last = 0.0
    if rest:
        inputs_T, targets_T = split.windows(np.array([len(split) - 1 - rest]), rest)
        with torch.no_grad():
            last = model.loss(torch.from_numpy(inputs_T), torch.from_numpy(targets_T)).item() * rest
    assert found.nats_D.sum() == pytest.approx(plain * targets.size + last, rel=1e-5)
    tokens = split.windows(np.array([0]), len(split) - 1)[1].ravel()
    assert len(found.nats_D) > 1
    assert len(found.nats_D) == (tokens == END).sum() + (tokens[-1] != END)


def test_other_data_and_other_objectives_are_refused(
    undisturbed: RunFolder, little: TokenData, data: TokenData, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(BadInput, match="is not the data that"):
        document_losses(undisturbed.path, data)
    masked = apply_settings(TINY, ["model.attends=bidirectional", "train.objective=mlm", "model.vocab_size=384"])
    monkeypatch.setattr(documents, "from_dict", lambda *_: masked)
    with pytest.raises(BadInput, match="its objective is mlm"):
        document_losses(undisturbed.path, little)


# ------------------------------------------------------------------------------------------------------------ bootstrap


def made_up(documents: int, seed: int, effect: float = 0.0):
    """Nats of two models and tokens, by document: documents differ in length and in how hard they are."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(50, 500, documents)
    base = draw.normal(3.0, 0.5, documents)
    return (base + effect + draw.normal(0, 0.05, documents)) * tokens, base * tokens, tokens


def test_the_difference_is_of_the_sums():
    a, b, tokens = made_up(50, 1, effect=-0.1)
    difference, low, high = document_bootstrap(a, b, tokens, seed=0)
    assert difference == pytest.approx(a.sum() / tokens.sum() - b.sum() / tokens.sum())
    assert low < difference < high < 0


def test_the_interval_is_a_function_of_the_seed_and_mirrors():
    a, b, tokens = made_up(50, 1)
    found = document_bootstrap(a, b, tokens, seed=3)
    assert found == document_bootstrap(a, b, tokens, seed=3)
    assert found != document_bootstrap(a, b, tokens, seed=4)
    difference, low, high = document_bootstrap(b, a, tokens, seed=3)
    assert (-difference, -high, -low) == pytest.approx(found)


def test_equal_models_have_no_noise_and_long_documents_count_for_more():
    a, _, tokens = made_up(20, 2)
    assert document_bootstrap(a, a, tokens, seed=0) == (0.0, 0.0, 0.0)
    difference, _, _ = document_bootstrap([90.0, 1.0], [0.0, 0.0], [90, 10], seed=0)
    assert difference == pytest.approx(0.91)


def test_over_enough_documents_it_covers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(documents, "RESAMPLES", 400)
    covered = 0
    for seed in range(300):
        a, b, tokens = made_up(80, seed, effect=-0.02)
        _, low, high = document_bootstrap(a, b, tokens, seed)
        covered += low <= -0.02 <= high
    assert 0.90 <= covered / 300 <= 0.98


def test_what_cannot_be_drawn_from_is_refused():
    with pytest.raises(ValueError, match="need the same documents"):
        document_bootstrap([1.0, 2.0], [1.0], [1, 1], seed=0)
    with pytest.raises(ValueError, match="two at least"):
        document_bootstrap([1.0], [1.0], [1], seed=0)
    with pytest.raises(ValueError, match="without tokens"):
        document_bootstrap([1.0, 0.0], [1.0, 0.0], [1, 0], seed=0)
