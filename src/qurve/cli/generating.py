"""The command that makes text."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg

from qurve.cli.shared import Device, Json, Precision, console_for, given, option, plain
from qurve.errors import BadInput

if TYPE_CHECKING:
    from qurve.generate import Generated, Piece


def generate(
    run: Annotated[Positional[Path], arg(metavar="RUN", help="A run's folder: its newest checkpoint is taken.")],
    prompts: Annotated[
        Positional[tuple[str, ...]],
        option(metavar="PROMPT…", help="Texts to go on with; - stands for standard input. Default: begin a document."),
    ] = (),
    prompt_file: Annotated[
        Path | None, option(metavar="FILE", help="One more prompt: what is in this file, but for a last line break.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, option(metavar="N", help="Tokens to make at most. Default: until the context is full.")
    ] = None,
    samples: Annotated[int, option(metavar="N", help="Texts for each prompt. Default: 1.")] = 1,
    temperature: Annotated[
        float, option(metavar="X", help="Below 1 likelier tokens, 0 the likeliest alone. Default: 1.")
    ] = 1.0,
    top_k: Annotated[int | None, option(metavar="K", help="Draw from the K likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, option(metavar="P", help="Draw from the likeliest tokens that have probability P together.")
    ] = None,
    min_p: Annotated[
        float | None, option(metavar="P", help="Draw from tokens at least P times as likely as the likeliest.")
    ] = None,
    repetition_penalty: Annotated[
        float, option(metavar="X", help="Above 1, tokens that were there before are made less likely. Default: 1.")
    ] = 1.0,
    seed: Annotated[int, option(metavar="N", help="Of the random numbers. Default: 0.")] = 0,
    stop: Annotated[
        UseAppendAction[tuple[str, ...]], option(metavar="TEXT", help="End before this text; again for another.")
    ] = (),
    beyond: Annotated[
        Literal["refuse", "slide"],
        option(
            metavar="refuse|slide",
            help="A text that outgrows the context is refused, or goes on from its last half. Default: refuse.",
        ),
    ] = "refuse",
    data: Annotated[
        Path | None, option(metavar="DIR", help="Where the run's data is now: its tokenizer is needed.")
    ] = None,
    precision: Precision = None,
    device: Device = None,
    compile: Annotated[
        FlagCreatePairsOff[bool],
        option(help="Spend some seconds first, so that each token of a single text costs less."),
    ] = False,
    as_json: Json = False,
) -> int:
    """Make text with a trained model. It is shown as it comes; with several texts, one after the other."""
    texts = _prompts(prompts, prompt_file)
    from qurve.train.config import TrainConfig
    from qurve.train.runtime import compiler, resolve_device, resolve_precision

    wanted = TrainConfig(**given(device=device, precision=precision))
    place = resolve_device(wanted.device)
    if compile and place == "cpu" and compiler() is None:
        raise BadInput("--compile: no C++ compiler is found (the variable CXX names one, clang++ say): leave it out")

    import torch

    from qurve.generate import Sampling, run_tokenizer, stream
    from qurve.model.gpt import GPT

    sampling = Sampling(repetition_penalty, temperature, top_k, top_p, min_p, seed)
    model = GPT.from_run(run).to(place)
    pieces = stream(
        model,
        texts,
        tokenizer=run_tokenizer(run, data),
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        samples=samples,
        stop=stop,
        beyond=beyond,
        dtype={"float32": torch.float32, "bf16": torch.bfloat16}[
            resolve_precision(wanted.precision, place.partition(":")[0])
        ],
        compile=compile,
    )
    begin, first = time.perf_counter(), 0.0

    def timed() -> Iterator[Piece]:
        nonlocal first
        for piece in pieces:
            first = first or time.perf_counter() - begin
            yield piece

    results = list(_finished(timed())) if as_json else _show(timed(), texts, samples)
    seconds = time.perf_counter() - begin
    results.sort(key=lambda made: (made.prompt, made.sample))
    tokens = sum(len(made.ids) for made in results)
    if as_json:
        rows = [
            {"prompt": texts[made.prompt], "sample": made.sample, "text": made.text, "ids": made.ids, "why": made.why}
            for made in results
        ]
        found = {"run": str(run), "texts": rows, "tokens": tokens, "seconds": seconds, "seconds_to_first": first}
        print(json.dumps(found))
        return 0
    reasons = Counter(made.why for made in results)
    ended = results[0].why if len(results) == 1 else ", ".join(f"{n} {why}" for why, n in reasons.items())
    say = plain(console_for(as_json=True))  # standard output has the text alone
    later = tokens - len(results)
    speed = f", then {later / (seconds - first):,.0f} tokens/s" if later else ""
    say(f"{tokens:,} tokens, the first after {first:.2f} s{speed}; ended: {ended}")
    return 0


def _prompts(prompts: Sequence[str], file: Path | None) -> list[str]:
    """All of the texts to go on with; an empty one where none is given."""
    if prompts.count("-") > 1:
        raise BadInput("-: standard input can be one prompt alone")
    texts = []
    for prompt in prompts:
        try:
            texts.append(sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt)
        except UnicodeDecodeError:
            raise BadInput("-: standard input is not UTF-8") from None
    if file is not None:
        try:
            texts.append(file.read_text(encoding="utf-8").removesuffix("\n"))
        except OSError as error:
            raise BadInput(f"--prompt-file {file} cannot be read ({error.strerror})") from None
        except UnicodeDecodeError:
            raise BadInput(f"--prompt-file {file} is not UTF-8") from None
    return texts or [""]


def _finished(pieces: Iterator[Piece]) -> Iterator[Generated]:
    for piece in pieces:
        if piece.result is not None:
            yield piece.result


def _show(pieces: Iterator[Piece], prompts: Sequence[str], samples: int) -> list[Generated]:
    """Write each text as it comes, the first one first; those after it wait for their turn."""
    results: dict[int, Generated] = {}
    waiting = [""] * (len(prompts) * samples)
    turn = 0
    try:
        _write(_heading(turn, samples, len(waiting)) + prompts[0])
        for piece in pieces:
            place = piece.prompt * samples + piece.sample
            waiting[place] += piece.text
            if piece.result is not None:
                results[place] = piece.result
            _write(waiting[turn])
            waiting[turn] = ""
            while turn in results and (turn := turn + 1) < len(waiting):
                _write("\n" + _heading(turn, samples, len(waiting)) + prompts[turn // samples] + waiting[turn])
                waiting[turn] = ""
    finally:
        _write("\n")  # also after Ctrl-C, so that what is said next has its own line
    return list(results.values())


def _heading(place: int, samples: int, texts: int) -> str:
    if texts == 1:
        return ""
    sample = f", sample {place % samples + 1}" if samples > 1 else ""
    return f"--- prompt {place // samples + 1}{sample}\n"


def _write(text: str) -> None:
    """To standard output, at once. A terminal gets no control characters: a model may make any."""
    if sys.stdout.isatty():
        text = "".join(sign if sign.isprintable() or sign in "\n\t" else "\N{REPLACEMENT CHARACTER}" for sign in text)
    sys.stdout.write(text)
    sys.stdout.flush()
