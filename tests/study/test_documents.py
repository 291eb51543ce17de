from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_study import BASELINE, NONLINEAR, WIDER, searched, write_study

from qurve.config import apply_settings
from qurve.data.loader import TokenData
from qurve.errors import BadInput
from qurve.model.gpt import GPT
from qurve.runfolder import RunFolder
from qurve.study import documents
from qurve.study.documents import DocumentLosses, by_document, document_bootstrap, document_losses, document_noise
from qurve.study.results import load
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


# ------------------------------------------------------------------------------------------------------- a whole study

ANY_DATA: Any = SimpleNamespace(folder="data")


def own_nats(arm: str) -> np.ndarray:
    return np.random.default_rng(arm.encode()[0]).normal(0, 1, 40)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs have invented losses over 40 documents, of which the arms share most; here is which were evaluated."""
    seen = []

    def losses(run: Path, data: Any, split: str, device: str) -> DocumentLosses:
        seen.append(f"{split} {run.parent.name} {run.name}")
        base = np.random.default_rng(0).normal(300, 50, 40)
        return DocumentLosses(base + own_nats(run.parent.name) + 10 * int(run.name[-1]), np.full(40, 100))

    monkeypatch.setattr(documents, "document_losses", losses)
    return seen


def test_a_study_is_evaluated_run_by_run_and_paired_by_document(tmp_path: Path, asked: list[str]) -> None:
    study = write_study(tmp_path, searched(BASELINE, NONLINEAR, WIDER), fates={("mlp-4.75", 2): "diverged"})
    found = document_noise(load(study), ANY_DATA)
    assert (found.split, found.documents, found.tokens) == ("test", 40, 4000)
    arms = {arm.arm: arm for arm in found.arms}
    layer, wider = arms["res-gelu"], arms["mlp-4.75"]
    assert (layer.seeds, wider.seeds, wider.diff) == ((1, 2, 3), (), None)
    assert "seed 2 diverged" in wider.why
    assert layer.low < layer.diff < layer.high
    assert layer.high - layer.low < 0.02  # the documents' own spread, 0.5 nats, is shared
    assert layer.diff == pytest.approx((own_nats("res-gelu") - own_nats("baseline")).sum() / 4000)
    assert asked.count("test baseline seed-1") == 1
    assert not any("mlp-4.75 seed" in run for run in asked)
    assert found.to_json()["note"].startswith("Evaluation noise only")


def test_a_study_without_a_difference_is_refused(tmp_path: Path, asked: list[str]) -> None:
    alone = load(write_study(tmp_path / "alone", (BASELINE,)))
    with pytest.raises(BadInput, match="no arm beside the baseline"):
        document_noise(alone, ANY_DATA)
    pending = load(
        write_study(tmp_path / "pending", (BASELINE, WIDER), fates={("mlp-4.75", n): "failed" for n in (1, 2, 3)})
    )
    with pytest.raises(BadInput, match=r"no arm can be compared: MLP 4\.75: no verdict yet: seed 1 failed"):
        document_noise(pending, ANY_DATA)
    assert asked == []
