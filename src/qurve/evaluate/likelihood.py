"""The log-likelihood of continuations: the one way in which everything here is scored.

Sequences of a batch are padded at the right, where a causal model's tokens never look, and are read from position 0 as
they would be alone. So neither the size of a batch nor what else is in it has a part in the numbers, but for the last
bits of a product of another shape.

Legend: B sequences, T tokens, V vocabulary, N targets of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from qurve.errors import BadInput
from qurve.evaluate.model import Evaluated

MOST_LOGITS = 1 << 27
"""Logits at a time, over the sequences of a batch: half a gigabyte of float32."""


@dataclass(frozen=True)
class Request:
    """How likely is `continuation` after `context` (one token at least)? Both are ids."""

    context: Sequence[int]
    continuation: Sequence[int]


@dataclass(frozen=True)
class Scored:
    log_likelihood: float
    """In nats, of the whole continuation."""
    greedy: bool
    """Whether each of its tokens is the likeliest one."""
    cut: int
    """Tokens of the context that did not fit the model's, at its left."""


def log_likelihoods(
    model: Evaluated,
    requests: Sequence[Request],
    *,
    batch_size: int = 8,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Scored]:
    """Score the requests, in their order. The softmax is over the whole vocabulary and in float32.

    A context that is too long for the model loses tokens at its left. Raises `BadInput` for a continuation that is, and
    for one without tokens; `progress` is told how many are done.
    """
    sequences: list[tuple[list[int], int, int]] = []  # ids but the last, number of targets, tokens cut off
    for place, request in enumerate(requests):
        n = len(request.continuation)
        if not n or n > model.context or not request.context:
            raise BadInput(
                f"request {place}: a context of {len(request.context)} and a continuation of {n} tokens; "
                f"{model.name} takes a continuation of 1 to {model.context}, and a context of at least 1"
            )
        ids = [*request.context, *request.continuation]
        cut = max(0, len(ids) - 1 - model.context)
        sequences.append((ids[cut:], n, cut))
    found: list[Scored | None] = [None] * len(sequences)
    done = 0
    for batch in _batches(model, sequences, batch_size):
        for place, scored in zip(batch, _score(model, [sequences[place] for place in batch]), strict=True):
            found[place] = scored
        done += len(batch)
        progress(done)
    return [scored for scored in found if scored is not None]


def _batches(model: Evaluated, sequences: Sequence[tuple[list[int], int, int]], most: int) -> Iterator[list[int]]:
    """Places of sequences, the longest first, so that those of a batch are of like length and the first needs most."""
    order = sorted(range(len(sequences)), key=lambda place: -len(sequences[place][0]))
    batch: list[int] = []
    targets = 0
    for place in order:
        ids, n, _ = sequences[place]
        first = min([len(ids) - 1 - n, *(len(sequences[p][0]) - 1 - sequences[p][1] for p in batch)])
        longest = len(sequences[batch[0]][0]) if batch else len(ids)
        targets = (longest - 1 - first) * (len(batch) + 1)
        if batch and (len(batch) == most or targets * model.n_ids > MOST_LOGITS):
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def _score(model: Evaluated, batch: Sequence[tuple[list[int], int, int]]) -> Iterator[Scored]:
    lengths = [len(ids) - 1 for ids, _, _ in batch]
    first = min(length - n for length, (_, n, _) in zip(lengths, batch, strict=True))
    ids_BT = torch.full((len(batch), max(lengths)), model.end)
    for row_T, length, (ids, _, _) in zip(ids_BT, lengths, batch, strict=True):
        row_T[:length] = torch.tensor(ids[:-1])
    logits_BTV = model.logits(ids_BT, torch.tensor(lengths), first)
    for logits_TV, length, (ids, n, cut) in zip(logits_BTV, lengths, batch, strict=True):
        logits_NV = logits_TV[length - n - first : length - first].float()
        wanted_N = torch.tensor(ids[-n:], device=logits_NV.device)
        nats_N = logits_NV.gather(1, wanted_N[:, None])[:, 0] - logits_NV.logsumexp(1)
        greedy = bool((logits_NV[:, : model.n_ids].argmax(1) == wanted_N).all())
        yield Scored(float(nats_N.double().sum()), greedy, cut)
