"""Making text: prompts of any lengths in one batch, token by token.

Legend: B sequences at work, T tokens, V vocabulary.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from qurve.data.tokenizers import Tokenizer
from qurve.errors import BadInput, did_you_mean
from qurve.generate.decoder import Decoder, why_not_compiled
from qurve.generate.sampling import Sampling
from qurve.generate.text import TextStream
from qurve.model.gpt import GPT
from qurve.model.init import stream_seed

Why = Literal["length", "stop", "end", "context"]
Beyond = Literal["refuse", "slide"]
Prompt = str | Sequence[int]

CHUNK = 256
"""Tokens of a prompt that are read at a time: what is computed for them at once stays small."""

PLAIN = Sampling()
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Generated:
    """What was made of one prompt, or one of several things that were."""

    prompt: int
    """Which of the prompts, counted from 0."""
    sample: int
    """Which of its samples, counted from 0."""
    ids: tuple[int, ...]
    """The new tokens, with those that ended the text."""
    text: str
    """The new text, without what ended it; empty where there is no tokenizer."""
    why: Why
    """Why it ended: `length` (as many tokens as were asked for), `stop` (a stop string), `end` (a stop id, such as the
    end of text) or `context` (which is full)."""


@dataclass(frozen=True)
class Piece:
    """One more token of one text."""

    prompt: int
    """Which of the prompts, counted from 0."""
    sample: int
    """Which of its samples, counted from 0."""
    id: int
    """The token."""
    text: str
    """The characters that are certain now, possibly none: whole ones, and nothing that may belong to a stop string."""
    result: Generated | None = None
    """The whole, with its last piece."""


def generate(
    model: GPT,
    prompts: Sequence[Prompt],
    *,
    tokenizer: Tokenizer | None = None,
    sampling: Sampling = PLAIN,
    max_new_tokens: int | None = None,
    samples: int = 1,
    stop: Sequence[str] = (),
    stop_ids: Sequence[int] | None = None,
    beyond: Beyond = "refuse",
    dtype: torch.dtype | None = None,
    compile: bool = False,
) -> list[Generated]:
    """Continue every prompt, `samples` times each; the results in the order of the prompts, then of the samples.

    Takes what `stream` takes, which has every option explained, and raises what it raises: `BadInput`, before anything
    is made.
    """
    pieces = stream(
        model,
        prompts,
        tokenizer=tokenizer,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        samples=samples,
        stop=stop,
        stop_ids=stop_ids,
        beyond=beyond,
        dtype=dtype,
        compile=compile,
    )
    return sorted((piece.result for piece in pieces if piece.result), key=lambda made: (made.prompt, made.sample))


def stream(
    model: GPT,
    prompts: Sequence[Prompt],
    *,
    tokenizer: Tokenizer | None = None,
    sampling: Sampling = PLAIN,
    max_new_tokens: int | None = None,
    samples: int = 1,
    stop: Sequence[str] = (),
    stop_ids: Sequence[int] | None = None,
    beyond: Beyond = "refuse",
    dtype: torch.dtype | None = None,
    compile: bool = False,
) -> Iterator[Piece]:
    """The same as it is made, token by token, the texts of a batch side by side.

    `prompts`: texts, for which the tokenizer is needed, or lists of ids; an empty text begins a document. `stop`:
    strings that end a text. `stop_ids`: ids that do; None stands for the tokenizer's end of text. `max_new_tokens`:
    None goes on until the context is full. `beyond`: what happens to a text that outgrows the context: `refuse` such
    a call, or `slide`: read the last half of the context anew and go on from there. `dtype`: of the matrix products.
    `compile`: spend some seconds first, so that each token costs less (see `Decoder`).

    Every sequence has random numbers of its own, from the seed, its prompt and its sample: what else is in the batch
    has no part in them. Ids beyond the tokenizer's are never made. Raises `BadInput` before anything is made.
    """
    if tokenizer is not None and tokenizer.n_ids > model.config.vocab_size:
        raise BadInput(
            f"the tokenizer {tokenizer.spec} has {tokenizer.n_ids:,} ids, the model's vocabulary only "
            f"{model.config.vocab_size:,}: it is not the one that the model was trained with"
        )
    n_ids = model.config.vocab_size if tokenizer is None else tokenizer.n_ids
    _check_model(model, beyond)
    for name, number in (("max_new_tokens", max_new_tokens), ("samples", samples)):
        if number is not None and (not isinstance(number, int) or number < 1):
            raise BadInput(f"{name} = {number!r}: it must be a whole number, at least 1")
    if dtype is not None and dtype not in DTYPES:
        raise BadInput(f"dtype = {dtype!r}: it must be {' or '.join(map(str, DTYPES))}")
    if isinstance(stop, str) or "" in stop:
        raise BadInput(f"stop = {stop!r}: it must be a list of strings, none of them empty")
    if stop and tokenizer is None:
        raise BadInput("stop strings are found in text: give the tokenizer, or stop_ids in their place")
    if beyond == "slide" and max_new_tokens is None:
        raise BadInput("beyond = slide: such a text need not end; give max_new_tokens")
    ids = [_ids(place, prompt, tokenizer, n_ids) for place, prompt in enumerate(_several(prompts))]
    if beyond == "refuse":
        for place, prompt_ids in enumerate(ids):
            _check_room(place, len(prompt_ids), max_new_tokens, model.config.context)
    if isinstance(stop_ids, int):
        raise BadInput(f"stop_ids = {stop_ids}: it must be a list of ids")
    ends = stop_ids if stop_ids is not None else [] if tokenizer is None else [tokenizer.eot]
    limits = _Limits(max_new_tokens, model.config.context if beyond == "refuse" else None, frozenset(ends))
    texts = []
    for prompt, prompt_ids in enumerate(ids):
        for sample in range(samples):
            chance = torch.Generator().manual_seed(stream_seed(sampling.seed, f"generate/{sample}/{prompt_ids}"))
            shown = None if tokenizer is None else TextStream(tokenizer, stop)
            texts.append(_Text(prompt, sample, list(prompt_ids), limits, chance, shown))
    if compile and (reason := why_not_compiled(model, len(texts), dtype or model.head_weight.dtype)):
        raise BadInput(f"compile: {reason}")
    return _run(model, texts, samples, sampling, n_ids, dtype, compile)


# ------------------------------------------------------------------------------------------------------------- the loop


@dataclass(frozen=True)
class _Limits:
    new: int | None
    """New tokens at most."""
    all: int | None
    """Tokens at most, those of the prompt among them."""
    ends: frozenset[int]


@dataclass
class _Text:
    """One text in the making."""

    prompt: int
    sample: int
    ids: list[int]
    """The prompt's, and the new ones."""
    limits: _Limits
    chance: torch.Generator
    shown: TextStream | None
    first: int = 0
    """Where in `ids` begins what the model sees."""
    new: int = 0
    parts: list[str] = field(default_factory=list)

    def add(self, token: int) -> Piece:
        """One more token; the piece has a result if it is the last."""
        self.ids.append(token)
        self.new += 1
        if token in self.limits.ends:
            why: Why | None = "end"
            text = "" if self.shown is None else self.shown.finish()
        else:
            text = "" if self.shown is None else self.shown.push(token)
            why = "stop" if self.shown is not None and self.shown.stopped else self._full()
            if self.shown is not None and why in ("length", "context"):
                text += self.shown.finish()
        self.parts.append(text)
        result = None
        if why is not None:
            result = Generated(self.prompt, self.sample, tuple(self.ids[-self.new :]), "".join(self.parts), why)
        return Piece(self.prompt, self.sample, token, text, result)

    def _full(self) -> Why | None:
        if self.new == self.limits.new:
            return "length"
        return "context" if len(self.ids) == self.limits.all else None

    def seen_by(self, context: int) -> list[int]:
        """The ids that the model has before it: all, or those since it last began with half of the context anew."""
        while len(self.ids) - self.first > context:
            self.first += context + 1 - max(1, context // 2)
        return self.ids[self.first :]


def _run(
    model: GPT,
    texts: list[_Text],
    samples: int,
    sampling: Sampling,
    n_ids: int,
    dtype: torch.dtype | None,
    compile: bool,
) -> Iterator[Piece]:
    context, device = model.config.context, model.head_weight.device
    decoder, logits_BV = _read(model, texts[::samples], dtype, compile)  # each prompt once, for all of its samples
    if samples > 1:
        rows_B = torch.arange(len(texts) // samples, device=device).repeat_interleave(samples)
        decoder.select(rows_B)
        logits_BV = logits_BV[rows_B]
    seen_BV = None
    if sampling.repetition_penalty != 1:
        seen_BV = torch.zeros(len(texts), n_ids, dtype=torch.bool, device=device)
        for text, seen_V in zip(texts, seen_BV, strict=True):
            seen_V[torch.tensor(text.ids, device=device)] = True
    while True:
        tokens = sampling.choose(logits_BV[:, :n_ids], seen_BV, [text.chance for text in texts])
        going = []
        for row, (text, token) in enumerate(zip(texts, tokens, strict=True)):
            piece = text.add(token)
            if piece.result is None:
                going.append(row)
            yield piece
        if not going:
            return
        token_B1 = torch.tensor(tokens, device=device)[:, None]
        if seen_BV is not None:
            seen_BV.scatter_(1, token_B1, True)
        if len(going) < len(texts):  # those that have ended cost nothing from now on
            rows_B = torch.tensor(going, device=device)
            texts, token_B1 = [texts[row] for row in going], token_B1[rows_B]
            seen_BV = None if seen_BV is None else seen_BV[rows_B]
            decoder.select(rows_B)
        if decoder.filled < context:
            logits_BV = decoder.read(token_B1)
        else:
            decoder, logits_BV = _read(model, texts, dtype, compile)


def _read(model: GPT, texts: list[_Text], dtype: torch.dtype | None, compile: bool) -> tuple[Decoder, Tensor]:
    """A decoder that has read the texts so far, and the logits of what follows them."""
    context, device = model.config.context, model.head_weight.device
    seen = [text.seen_by(context) for text in texts]
    longest = max(map(len, seen))
    padding = [longest - len(ids) for ids in seen]
    ids_BT = torch.tensor([[0] * pad + ids for pad, ids in zip(padding, seen, strict=True)], device=device)
    to_come = texts[0].limits.new or 0
    decoder = Decoder(
        model,
        len(texts),
        torch.tensor(padding, device=device) if any(padding) else None,
        min(context, longest + to_come),
        dtype,
        compile=compile,
    )
    whole = model.config.attends == "prefix"  # all of a prefix has to be in one pass
    for part_BT in torch.split(ids_BT, longest if whole else CHUNK, dim=1):
        logits_BV = decoder.read(part_BT)
    return decoder, logits_BV


# ------------------------------------------------------------------------------------------------------------- refusals


def _check_model(model: GPT, beyond: Beyond) -> None:
    if model.config.attends == "bidirectional":
        raise BadInput("a bidirectional model sees the tokens to come: it cannot make them one after the other")
    if model.training:
        raise BadInput("the model is in training mode, where dropout acts: call model.eval() first")
    if beyond not in ("refuse", "slide"):
        raise BadInput(f"beyond = {beyond!r}{did_you_mean(str(beyond), ('refuse', 'slide'))}")
    if beyond == "slide" and model.config.attends == "prefix":
        raise BadInput(
            "beyond = slide: a prefix model's prompt is its prefix, which sliding would take away; take 'refuse'"
        )


def _check_room(place: int, length: int, new: int | None, context: int) -> None:
    """Raise `BadInput` for a text that would outgrow the context."""
    if length + (new or 1) <= context:
        return
    tokens = f"{length:,} token{'s' * (length != 1)}" + (
        f"; with {new:,} new ones that is {length + new:,}" if new else ""
    )
    room = context - length
    way_out = f"ask for at most {room:,} new tokens" if room > 0 else "shorten it"
    raise BadInput(
        f"prompt {place + 1} has {tokens}, and the model's context holds {context:,}: {way_out}, or let the context "
        "slide (beyond = slide)"
    )


def _several(prompts: Sequence[Prompt]) -> list[Prompt]:
    found = [] if isinstance(prompts, str | bytes | Mapping) else list(prompts)
    if (not found and prompts) or not all(isinstance(p, str | Iterable) and not isinstance(p, bytes) for p in found):
        raise BadInput("prompts must be a list of texts, or of lists of ids; put a single one into a list")
    if not found:
        raise BadInput("there are no prompts; give at least one (an empty text begins a document)")
    return found


def _ids(place: int, prompt: Prompt, tokenizer: Tokenizer | None, n_ids: int) -> list[int]:
    """The prompt's ids, checked."""
    name = f"prompt {place + 1}"
    if not isinstance(prompt, str):
        ids = [_id(name, token) for token in prompt]
        if not ids:
            raise BadInput(f"{name} has no ids; begin a document with the end-of-text id, or with an empty text")
        for token in ids:
            if not 0 <= token < n_ids:
                raise BadInput(f"{name} has the id {token}; they are 0 to {n_ids - 1}")
        return ids
    if tokenizer is None:
        raise BadInput(f"{name} is a text: give the tokenizer, or the prompts as lists of ids")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise BadInput(f"{name} is not valid UTF-8") from None
    return tokenizer.encode_batch([prompt])[0].tolist() or [tokenizer.eot]


def _id(name: str, token: Any) -> int:
    """A whole number, of whatever library: of a tensor's and an array's elements, too."""
    try:
        return operator.index(token)
    except TypeError:
        raise BadInput(f"{name} has {token!r} where an id, a whole number, must be") from None
