"""Likelihood tasks from files: which choice is likeliest, or whether a text's end is the likeliest one.

A task is a file `NAME.jsonl`, `.jsonl.gz` or `.jsonl.zst` with an object a line, all of one kind:

    {"context": "…", "choices": [" …", " …"], "label": 0}        the likeliest continuation of a context
    {"contexts": ["…", "…"], "choices": [" …", " …"], "label": 1}   the same, a context for each choice
    {"context": "…", "target": " …"}                             is the target the likeliest continuation?

`label` is the place of the right choice, from 0. A choice and a target begin with the space that parts them from the
context. Other fields are ignored.
"""

from __future__ import annotations

import hashlib
import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qurve.data.sources import json_objects
from qurve.errors import BadInput
from qurve.evaluate.likelihood import Request, Scored, log_likelihoods
from qurve.evaluate.model import Evaluated

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")


@dataclass(frozen=True)
class Item:
    """`contexts[i]` goes before `choices[i]`; without a label (None) the only choice is the target."""

    contexts: tuple[str, ...]
    choices: tuple[str, ...]
    label: int | None


@dataclass(frozen=True)
class Task:
    name: str
    sha256: str
    """Of the items, in their order."""
    items: tuple[Item, ...]


@dataclass(frozen=True)
class TaskResult:
    task: str
    sha256: str
    correct: tuple[bool, ...]
    """Item by item: is the right choice the likeliest, or each token of the target?"""
    correct_norm: tuple[bool, ...] | None
    """The same with each choice's log-likelihood divided by its length in bytes; None for targets."""
    perplexity: float | None
    """Of the targets, per token."""
    chance: float | None
    """Accuracy of a blind guess."""
    cut: int
    """Items whose context was too long and lost tokens at its left."""

    @property
    def items(self) -> int:
        return len(self.correct)

    @property
    def accuracy(self) -> float:
        return sum(self.correct) / self.items

    @property
    def accuracy_norm(self) -> float | None:
        return None if self.correct_norm is None else sum(self.correct_norm) / self.items

    @property
    def interval(self) -> tuple[float, float]:
        """95 per cent, of the accuracy: how far it hangs on these items, the model as it is."""
        return wilson_interval(sum(self.correct), self.items)

    @property
    def interval_norm(self) -> tuple[float, float] | None:
        return None if self.correct_norm is None else wilson_interval(sum(self.correct_norm), self.items)

    def to_json(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "items": self.items,
            "accuracy": self.accuracy,
            "interval": self.interval,
            "accuracy_norm": self.accuracy_norm,
            "interval_norm": self.interval_norm,
            "target_perplexity": self.perplexity,
            "chance": self.chance,
            "cut": self.cut,
            "sha256": self.sha256,
        }


def wilson_interval(hits: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a share, of `hits` in `n` tries. Source: Wilson 1927."""
    z = statistics.NormalDist().inv_cdf((1 + level) / 2)
    share, spread = hits / n, z * z / n
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(spread * (share * (1 - share) + spread / 4)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


# ------------------------------------------------------------------------------------------------------------- reading


def read_task(path: str | os.PathLike[str], limit: int | None = None) -> Task:
    """The task of a file, or its first `limit` items; its name is the file's, without the ending.

    Raises `BadInput` with the file and the line for what is none of the three kinds, or not the kind of the first line.
    """
    file = Path(path)
    suffix = next((end for end in sorted(SUFFIXES, key=len, reverse=True) if file.name.lower().endswith(end)), None)
    if suffix is None or not file.is_file():
        what = "does not exist" if not file.exists() else f"is no file ending in {', '.join(SUFFIXES)}"
        raise BadInput(f"{file} {what}; a task is a file of one JSON object a line (see docs/evaluation.md)")
    items: list[Item] = []
    for place, record in json_objects(file):
        item = _item(record, place)
        if items and (item.label is None) != (items[0].label is None):
            raise BadInput(
                f"{place}: the first line has {'a target' if items[0].label is None else 'choices'}, this not"
            )
        items.append(item)
        if len(items) == limit:
            break
    if not items:
        raise BadInput(f"{file} holds no item")
    return Task(file.name[: -len(suffix)], hashlib.sha256(repr(items).encode()).hexdigest(), tuple(items))


def _item(record: dict[str, Any], place: str) -> Item:
    if "target" in record:
        context, target = record.get("context"), record["target"]
        if not isinstance(context, str) or not isinstance(target, str) or not target:
            raise BadInput(f"{place}: 'context' and 'target' must be texts, the target not empty")
        return Item((context,), (target,), None)
    choices, label = record.get("choices"), record.get("label")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
        raise BadInput(
            f"{place}: 'choices' must be two or more texts, none empty; it has the fields {', '.join(record)}"
        )
    if not isinstance(label, int) or isinstance(label, bool) or not 0 <= label < len(choices):
        raise BadInput(
            f"{place}: 'label' is {label!r}; it must be the place of the right choice, 0 to {len(choices) - 1}"
        )
    contexts = record["contexts"] if "contexts" in record else [record.get("context")] * len(choices)
    if not isinstance(contexts, list) or len(contexts) != len(choices) or not all(isinstance(c, str) for c in contexts):
        raise BadInput(f"{place}: it needs a text 'context', or 'contexts', one text for each of the choices")
    return Item(tuple(contexts), tuple(choices), label)


# ------------------------------------------------------------------------------------------------------------- scoring


def evaluate_task(
    model: Evaluated, task: Task, *, batch_size: int = 8, progress: Callable[[int], None] = lambda _: None
) -> TaskResult:
    """Score every item of the task. Of choices that are equally likely the first counts.

    Raises `BadInput` for a choice or a target that is longer than the model's context.
    """
    pairs = [pair for item in task.items for pair in zip(item.contexts, item.choices, strict=True)]
    requests = as_requests(model, pairs)
    for (_, choice), request in zip(pairs, requests, strict=True):
        if len(request.continuation) > model.context:
            raise BadInput(
                f"{task.name}: {choice[:40]!r}… has {len(request.continuation)} tokens, more than the context of "
                f"{model.name}, {model.context}"
            )
    scored = log_likelihoods(model, requests, batch_size=batch_size, progress=progress)
    correct, correct_norm, cut = [], [], 0
    at = 0
    for item in task.items:
        mine, at = scored[at : at + len(item.choices)], at + len(item.choices)
        cut += any(one.cut for one in mine)
        if item.label is None:
            correct.append(mine[0].greedy)
            continue
        nats = [one.log_likelihood for one in mine]
        correct.append(_largest(nats) == item.label)
        lengths = [len(choice.encode()) for choice in item.choices]
        correct_norm.append(_largest([n / length for n, length in zip(nats, lengths, strict=True)]) == item.label)
    targets = task.items[0].label is None
    return TaskResult(
        task=task.name,
        sha256=task.sha256,
        correct=tuple(correct),
        correct_norm=None if targets else tuple(correct_norm),
        perplexity=_perplexity(scored, requests) if targets else None,
        chance=None if targets else statistics.fmean(1 / len(item.choices) for item in task.items),
        cut=cut,
    )


def as_requests(model: Evaluated, pairs: Sequence[tuple[str, str]]) -> list[Request]:
    """The ids of (context, continuation) pairs of text.

    Both are encoded together, so that the border falls as in running text, and what begins the continuation is what
    follows the context's own ids. Spaces at a context's end go to the continuation. An empty context is the id
    `model.first`; `model.start`, if there is one, stands before every context.
    """
    moved = [(context.rstrip(), context[len(context.rstrip()) :] + rest) for context, rest in pairs]
    whole = model.encode([context + rest for context, rest in moved])
    contexts = model.encode([context for context, _ in moved])
    requests = []
    for (_, rest), ids, context in zip(moved, whole, contexts, strict=True):
        if len(ids) <= len(context):  # the continuation went into the context's last token
            ids = [*context, *model.encode([rest])[0]]
        before = [model.first] if model.start is not None or not context else []
        requests.append(Request([*before, *ids[: len(context)]], ids[len(context) :]))
    return requests


def _largest(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _perplexity(scored: Sequence[Scored], requests: Sequence[Request]) -> float:
    tokens = sum(len(request.continuation) for request in requests)
    return math.exp(min(700.0, -sum(one.log_likelihood for one in scored) / tokens))
