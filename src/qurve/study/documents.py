"""Evaluation noise: how far the difference between two trained models hangs on the documents they were measured on.

This is the noise of the measure, of one pair of models. It says nothing of other seeds: over the three to seven seeds
of a study a bootstrap does not cover, and the verdict's paired t test is what speaks of them.

`document_noise` says it of a whole study (`qurve study documents`).

Legend: N windows, T tokens of one, S targets of a split, D documents, R resamples.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from qurve.config import from_dict
from qurve.data.loader import TokenData
from qurve.errors import BadInput
from qurve.generate.text import run_tokenizer
from qurve.runfolder import RunFolder
from qurve.study.effects import not_comparable, shared_seeds
from qurve.study.results import Arm, StudyResults
from qurve.study.tables import signed

if TYPE_CHECKING:
    from rich.console import Group

Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]

RESAMPLES = 10_000
MOST_DRAWN = 1 << 20
"""Documents drawn at a time, over several resamples: what bounds the memory."""


@dataclass(frozen=True)
class DocumentLosses:
    """What one model's loss is made of. `nats_D.sum() / tokens_D.sum()` is its mean over every token but the first."""

    nats_D: Floats
    tokens_D: Int64s


def document_bootstrap(
    nats_by_document_a: npt.ArrayLike,
    nats_by_document_b: npt.ArrayLike,
    tokens_by_document: npt.ArrayLike,
    seed: int,
    level: float = 0.95,
) -> tuple[float, float, float]:
    """The difference a - b of two models' losses in nats per token, and its interval: `(difference, low, high)`.

    Percentile bootstrap of the ratio sum of nats / sum of tokens: documents are drawn with replacement, the same ones
    for both models, and a document keeps all of its tokens. Raises `ValueError` for arrays of other lengths than each
    other, for fewer than two documents, and where there are no tokens.
    """
    a_D, b_D = np.asarray(nats_by_document_a, np.float64), np.asarray(nats_by_document_b, np.float64)
    tokens_D = np.asarray(tokens_by_document, np.float64)
    if not (a_D.shape == b_D.shape == tokens_D.shape and a_D.ndim == 1 and len(a_D) >= 2):
        raise ValueError(
            f"nats and tokens by document have the shapes {a_D.shape}, {b_D.shape} and {tokens_D.shape}: both models "
            "need the same documents, two at least"
        )
    if tokens_D.min() <= 0:
        raise ValueError("a document without tokens: leave it out for both models")
    difference_D, documents = a_D - b_D, len(a_D)
    draw, drawn = np.random.default_rng(seed), []
    for count in _blocks(RESAMPLES, max(1, MOST_DRAWN // documents)):
        chosen_RD = draw.integers(0, documents, (count, documents))
        drawn.append(difference_D[chosen_RD].sum(axis=1) / tokens_D[chosen_RD].sum(axis=1))
    low, high = np.quantile(np.concatenate(drawn), [(1 - level) / 2, (1 + level) / 2])
    return float(difference_D.sum() / tokens_D.sum()), float(low), float(high)


def _blocks(total: int, most: int) -> list[int]:
    return [min(most, total - begin) for begin in range(0, total, most)]


def by_document(nats_S: Floats, targets_S: Int64s, end_of_text: int) -> DocumentLosses:
    """Sum the losses of targets, in their order, by the document that each stands in; its end-of-text id ends it."""
    ended_S = np.cumsum(targets_S == end_of_text)
    document_S = np.concatenate([[0], ended_S[:-1]])
    return DocumentLosses(np.bincount(document_S, nats_S).astype(np.float64), np.bincount(document_S))


def document_losses(
    run: str | os.PathLike[str], data: TokenData, split: str = "val", device: str = "auto"
) -> DocumentLosses:
    """The loss of a run's newest checkpoint on every document of a split, in the split's order.

    The context is that of training: windows that do not overlap cross document boundaries, and the last one may be
    shorter. Each token of the split but its first is a target once. Precision is the run's.

    Raises `BadInput` for data that the run was not trained on, and for objectives other than the causal one.
    """
    import torch
    from torch.nn.functional import cross_entropy

    from qurve.model.gpt import GPT
    from qurve.train.config import RunConfig
    from qurve.train.runtime import autocast, modest_micro_batch, resolve_device, resolve_precision

    tree, _ = RunFolder(run).config_json()
    config = from_dict(RunConfig, {key: value for key, value in tree.items() if key != "format"})
    if config.train.objective.kind != "causal":
        raise BadInput(f"{run}: its objective is {config.train.objective.kind}; losses by document take causal")
    end_of_text = run_tokenizer(run, data.folder).eot
    place = resolve_device(device)
    kind = place.partition(":")[0]
    precision = resolve_precision(config.train.precision, kind)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, device=place, precision=precision))

    tokens, context, model = data.split(split), config.model.context, GPT.from_run(run).to(place)
    count = len(tokens) - 1
    nats_S, targets_S = np.empty(count), np.empty(count, np.int64)
    starts_N = np.arange(0, count - context + 1, context)
    size = modest_micro_batch(config, kind, config.sequences)
    parts = [(starts_N[begin : begin + size], context) for begin in range(0, len(starts_N), size)]
    if rest := count % context:
        parts.append((np.array([count - rest]), rest))
    for part_N, length in parts:
        inputs_NT, targets_NT = tokens.windows(part_N, length)
        with torch.no_grad(), autocast(config):
            logits_NTV = model(torch.from_numpy(inputs_NT).to(place))
        wanted_NT = torch.from_numpy(targets_NT).to(place)
        losses = cross_entropy(logits_NTV.flatten(0, 1).float(), wanted_NT.flatten(), reduction="none")
        here = slice(int(part_N[0]), int(part_N[0]) + targets_NT.size)
        nats_S[here], targets_S[here] = losses.cpu().numpy(), targets_NT.ravel()
    return by_document(nats_S, targets_S, end_of_text)


# ------------------------------------------------------------------------------------------------------ a whole study

RESAMPLING_SEED = 0


@dataclass(frozen=True)
class DocumentDifference:
    """One arm against the baseline on the same documents: the mean over the seeds that both have finished.

    The interval is over the documents alone, the trained models as they are. None of it where `why` says so.
    """

    arm: str
    label: str
    seeds: tuple[int, ...]
    diff: float | None
    low: float | None
    high: float | None
    why: str = ""


@dataclass(frozen=True)
class DocumentNoise:
    split: str
    documents: int
    tokens: int
    """Targets of the whole split, each once."""
    arms: tuple[DocumentDifference, ...]

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "resamples": RESAMPLES, "note": NOTE}


NOTE = (
    "Evaluation noise only: the models are as they were trained and the documents are drawn anew. It says nothing of "
    "other seeds; the study's verdict does."
)


def document_noise(results: StudyResults, data: TokenData, device: str = "auto") -> DocumentNoise:
    """Every arm's difference to the baseline over the documents of the split that the study reports on, all of them.

    Evaluates the newest checkpoint of each finished run. The nats of a document are their mean over the seeds, for both
    arms the same ones. Raises `BadInput` for a study without another arm, for a split of one document, where no run is
    finished, and as `document_losses` does.
    """
    if not results.others:
        raise BadInput(f"{results.folder}: there is no arm beside the baseline, and so no difference")
    tokens_D: Int64s | None = None
    base: dict[int, Floats] = {}

    def nats(arm: Arm, seed: int) -> Floats:
        nonlocal tokens_D
        run = results.folder / "runs" / arm.name / f"seed-{seed}"
        found = document_losses(run, data, results.split, device)
        if len(found.tokens_D) < 2:
            raise BadInput(f"{data.folder}: its {results.split} split is one document: there is nothing to draw from")
        tokens_D = found.tokens_D
        return found.nats_D

    arms = []
    for arm in results.others:
        why = not_comparable(results, arm)
        seeds = () if why else shared_seeds(results, [arm])
        if not seeds:
            arms.append(DocumentDifference(arm.name, arm.label, (), None, None, None, why or "no seed in both"))
            continue
        base |= {seed: nats(results.baseline, seed) for seed in seeds if seed not in base}
        ours_D = np.mean([nats(arm, seed) for seed in seeds], axis=0)
        base_D = np.mean([base[seed] for seed in seeds], axis=0)
        assert tokens_D is not None
        found = document_bootstrap(ours_D, base_D, tokens_D, RESAMPLING_SEED)
        arms.append(DocumentDifference(arm.name, arm.label, seeds, *found))
    if tokens_D is None:
        raise BadInput(f"{results.folder}: no arm can be compared: {'; '.join(f'{a.label}: {a.why}' for a in arms)}")
    return DocumentNoise(results.split, len(tokens_D), int(tokens_D.sum()), tuple(arms))


def document_table(noise: DocumentNoise, baseline: str) -> Group:
    """The same for the terminal: a row per arm, then what it is and what it is not."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column(f"against {baseline}", overflow="fold")
    for name in ("seeds", "difference", "95 % interval, over documents"):
        table.add_column(name, justify="right")
    for arm in noise.arms:
        interval = arm.why if arm.low is None else f"{signed(arm.low, 4)} to {signed(arm.high, 4)}"
        table.add_row(*map(Text, (arm.label, str(len(arm.seeds)), signed(arm.diff, 4), interval)))
    what = (
        f"Nats per token on all {noise.tokens:,} tokens of the {noise.split} split's {noise.documents:,} documents, "
        f"mean over the seeds; bootstrap of {RESAMPLES:,} resamples."
    )
    return Group(table, Text(what), Text(NOTE))
