"""The loss on text in three units: nats per token, bits per byte, perplexity; always with the context it was taken at.

Windows of `context` tokens move on by `stride`, and each token is a target once: in the first window that reaches it. A
stride below the context gives every token but a text's first ones at least `context - stride` tokens before it, and
costs `context / stride` times as much. Bits per byte compare models of different tokenizers; the other two do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np

from qurve.data.loader import MANIFEST, TokenData
from qurve.data.tokenizers import load, ready_made
from qurve.errors import BadInput
from qurve.evaluate.likelihood import Request, log_likelihoods
from qurve.evaluate.model import Evaluated

MOST_WAITING = 1 << 20
"""Tokens of text that are scored together, sorted by length."""
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Loss:
    """What was measured: `nats` over `tokens` targets, which stand for `n_bytes` bytes of text."""

    nats: float
    tokens: int
    n_bytes: int
    documents: int | None
    """Each read on its own; None where they follow each other as in training."""
    context: int
    stride: int

    @property
    def loss(self) -> float:
        """In nats per token."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.n_bytes

    @property
    def perplexity(self) -> float:
        """Per token; infinite where it is too large for a number."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def to_json(self) -> dict[str, Any]:
        derived = {"loss": self.loss, "bits_per_byte": self.bits_per_byte, "perplexity": self.perplexity}
        return {**derived, **asdict(self)}


def spans(count: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(begin, first target, end) of the windows over `count` tokens; the first token is no target."""
    begin, done = 0, 1
    while done < count:
        end = min(begin + context + 1, count)
        yield begin, done, end
        begin, done = begin + stride, end


def document_requests(model: Evaluated, ids: Sequence[int], context: int, stride: int) -> list[Request]:
    """What has to be scored for the loss on one document's tokens, all of which are targets."""
    ids = [model.first, *ids]
    return [Request(ids[begin:done], ids[done:end]) for begin, done, end in spans(len(ids), context, stride)]


def text_loss(
    model: Evaluated,
    documents: Iterable[str],
    *,
    context: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    progress: Progress = lambda _: None,
) -> Loss:
    """The loss on documents, each read on its own after the id `model.first`. Targets are the tokens of the text alone.

    `context` is the model's by default, `stride` the context. Raises `BadInput` for numbers that do not fit the model,
    and where there is no text.
    """
    context, stride = _checked(model, context, stride)
    nats, tokens, n_bytes, read = 0.0, 0, 0, 0
    for texts in _gathered(documents):
        requests = []
        for text, ids in zip(texts, model.encode(texts), strict=True):
            read, n_bytes, tokens = read + 1, n_bytes + len(text.encode()), tokens + len(ids)
            requests += document_requests(model, ids, context, stride)
        nats -= sum(scored.log_likelihood for scored in log_likelihoods(model, requests, batch_size=batch_size))
        progress(tokens)
    if not tokens:
        raise BadInput("there is no text to take the loss on: all documents are empty")
    return Loss(nats, tokens, n_bytes, read, context, stride)


def split_loss(
    model: Evaluated,
    data: TokenData,
    split: str = "val",
    *,
    context: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    progress: Progress = lambda _: None,
) -> Loss:
    """The loss on all of a split of prepared data, as in training: windows cross the borders of documents, and the
    end-of-text ids are targets too. Each token but the split's first is a target once. Otherwise as `text_loss`.
    """
    context, stride = _checked(model, context, stride)
    tokens = data.split(split)
    tokenizer = load(data.folder) if (data.folder / MANIFEST).is_file() else ready_made(data.tokenizer)
    count, nats, n_bytes = len(tokens) - 1, 0.0, 0
    if count < 1:
        raise BadInput(f"{data.folder}: its {split} split has one token, and so no target")
    for part in _parts(spans(len(tokens), context, stride), max(1, MOST_WAITING // context)):
        requests = []
        for begin, done, end in part:
            inputs_1T, targets_1T = tokens.windows(np.array([begin]), end - begin - 1)
            ids = [*inputs_1T[0].tolist(), int(targets_1T[0, -1])]
            requests.append(Request(ids[: done - begin], ids[done - begin :]))
            n_bytes += len(tokenizer.decode_bytes([i for i in requests[-1].continuation if i != tokenizer.eot]))
        nats -= sum(scored.log_likelihood for scored in log_likelihoods(model, requests, batch_size=batch_size))
        progress(part[-1][2] - 1)
    return Loss(nats, count, n_bytes, None, context, stride)


def _parts(spans: Iterator[tuple[int, int, int]], most: int) -> Iterator[list[tuple[int, int, int]]]:
    while part := list(islice(spans, most)):
        yield part


def _checked(model: Evaluated, context: int | None, stride: int | None) -> tuple[int, int]:
    context = model.context if context is None else context
    stride = context if stride is None else stride
    if not 1 <= context <= model.context:
        raise BadInput(f"context {context}: {model.name} reads 1 to {model.context} tokens")
    if not 1 <= stride <= context:
        raise BadInput(f"stride {stride}: it must be 1 to the context, {context}, so that every token is a target")
    return context, stride


def _gathered(documents: Iterable[str]) -> Iterator[list[str]]:
    """The documents, so many at a time that their lengths can be sorted and their tokens still fit the memory."""
    texts: list[str] = []
    waiting = 0
    for text in documents:
        texts.append(text)
        waiting += len(text)
        if waiting >= MOST_WAITING:
            yield texts
            texts, waiting = [], 0
    if texts:
        yield texts
