"""Write `docs/performance.md` anew from the benchmarks' evidence in `results/`; `--check` only says whether it is up to
date.

    python tools/performance.py [--check]

A section is an entry of `SECTIONS`: its files, what is said before them, and a function that makes tables of one file's
evidence. A file that is not there yet is said to be missing; a target that is not reached is said to be missed.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"

Evidence = dict[str, Any]
Tables = Callable[[Evidence], Iterator[str]]

HEAD = """\
# Speed and memory

Every figure is a ratio from one run on one machine: the sides take turns, the ratio is taken within a round, and the
median is given with the quartiles behind it. Compilation and warm-up come before, and are told apart. Each benchmark
first checks that its sides compute the same. Absolute speeds belong to the machine that is named.

This page is generated from the evidence that is named under each title; [how to make that anew](../REPRODUCE.md).
`make bench-check` measures a few ratios again, quickly, and fails when one has fallen by a quarter.
"""


@dataclass(frozen=True)
class Section:
    title: str
    text: str
    parts: tuple[tuple[str, Tables], ...]
    """Names of files in `results/` (`*` for any of several), each with what makes tables of one."""
    after: str = ""
    """What explains the figures, a missed target say; only printed with them."""


def page(results: Path) -> str:
    return "\n".join([HEAD, *(text for section in SECTIONS for text in _section(section, results))])


def _section(section: Section, results: Path) -> Iterator[str]:
    yield f"## {section.title}\n\n{section.text}\n"
    measured = False
    for name, tables in section.parts:
        files = sorted(results.glob(f"{name}.json"))
        if not files:
            yield f"**Not measured yet**: `{name}.json` is not among the results.\n"
        for file in files:
            evidence = json.loads(file.read_text(encoding="utf-8"))
            yield _source(file, evidence) + "\n"
            yield from (text + "\n" for text in tables(evidence))
            measured = True
    if measured and section.after:
        yield section.after + "\n"


def _source(file: Path, evidence: Evidence) -> str:
    machine = evidence.get("machine", {})
    machine = {"torch": evidence.get("torch"), **(machine if isinstance(machine, dict) else {"cpu": machine})}
    named = [machine.get("gpu") or machine.get("cpu"), f"torch {machine['torch']}"]
    if machine.get("cores") and not machine.get("gpu"):
        named.insert(1, f"{machine['cores']} cores")
    said = "; ".join(name for name in named if name)
    command = f"`{evidence['command']}`, " if "command" in evidence else ""
    return f"*`results/{file.name}`: {command}{said}.*"


# ---------------------------------------------------------------------------------------------- what tables are made of


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    columns = list(columns)
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def figure(value: Any, form: str = ".3f") -> str:
    """A number, or a median with its quartiles (`{median, low, high}`, or the rounds themselves)."""
    if value is None:
        return "not measured"
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    if isinstance(value, list):
        low, _, high = statistics.quantiles(value, n=4, method="inclusive")
        value = {"median": statistics.median(value), "low": low, "high": high}
    if isinstance(value, dict):
        return f"{value['median']:{form}} ({value['low']:{form}} to {value['high']:{form}})"
    return f"{value:{form}}"


def middle(value: Any) -> float:
    if isinstance(value, list):
        return float(statistics.median(value))
    return float(value["median"] if isinstance(value, dict) else value)


@dataclass(frozen=True)
class Target:
    what: str
    bound: float
    at_most: bool = False

    def row(self, value: Any, form: str = ".2f") -> list[str]:
        """Cells: what, measured, target, whether it is reached. None is not measured."""
        stated = f"{'at most' if self.at_most else 'at least'} {self.bound:g}"
        if value is None:
            return [self.what, "not measured", stated, ""]
        reached = middle(value) <= self.bound if self.at_most else middle(value) >= self.bound
        return [self.what, figure(value, form), stated, "reached" if reached else "**missed**"]


def targets(rows: Iterable[list[str]]) -> str:
    return table(["", "measured", "target", ""], rows)


# --------------------------------------------------------------------------------------------------------- the sections


PAPER_WIDTH = 768
TIMES_PEER = {384: 2.2, PAPER_WIDTH: 2.0}
"""The target for a model of that width."""


def training(evidence: Evidence) -> Iterator[str]:
    shape, rounds = evidence["shape"], evidence["rounds"]
    yield (
        f"L{shape['layers']} D{shape['width']} H{shape['heads']} T{shape['context']} B{shape['batch']} "
        f"V{shape['vocab']}, {shape['threads']} threads, our side in {shape['precision']}."
    )
    targets_of = {
        "ratio_to_nanogpt": ("our linear query, times nanoGPT's tokens/s", TIMES_PEER[shape["width"]]),
        "ratio_nonlinear_to_authors": (
            "our nonlinear query, times the authors' tokens/s",
            TIMES_PEER[shape["width"]],
        ),
        "ratio_nonlinear_to_linear": ("the nonlinear query, times our linear one's tokens/s", 0.985),
    }
    if shape["width"] == PAPER_WIDTH:
        targets_of["share_of_peak_linear"] = ("linear query: `6 N + 12 L D T` a token, over the matrix peak", 0.85)
    rows = [Target(*target).row(rounds[key], ".3f") for key, target in targets_of.items() if key in rounds]
    for peer, name in (("nanogpt", "nanoGPT's"), ("authors", "the authors'")):
        if (ratio := evidence.get(f"memory_ratio_to_{peer}")) is not None:
            rows.append(Target(f"peak memory, linear query, times {name}", 0.6, at_most=True).row([ratio]))
    yield targets(rows)
    yield table(
        ["", "tokens/s", "first step, compilation included", "peak memory"],
        [
            [
                side,
                figure(rounds[side], ",.0f"),
                f"{seconds:.0f} s",
                f"{evidence['peak_memory_bytes'][side] / 1e9:.2f} GB",
            ]
            for side, seconds in evidence["compile_seconds"].items()
        ],
    )


def where_time_goes(evidence: Evidence) -> Iterator[str]:
    shape, total = evidence["shape"], evidence["step_ms"]
    yield (
        f"Where a step's {total:,.0f} ms go (L{shape['layers']} D{shape['width']} T{shape['context']} "
        f"B{shape['batch']}, nonlinear query; profiled, which adds a little); the matrix peak is "
        f"{evidence['matrix_peak_flops'] / 1e9:,.0f} GFLOP/s, the memory reads "
        f"{evidence['bandwidth_bytes_per_s'] / 1e9:.0f} GB/s."
    )
    yield table(
        ["", "ms", "of the step"], [[k, f"{ms:,.0f}", f"{ms / total:.1%}"] for k, ms in evidence["kinds_ms"].items()]
    )
    yield table(
        ["products (rows x inner x columns)", "times", "ms", "FLOPs, of the matrix peak", "bytes, of the bandwidth"],
        [
            [
                row["shape"],
                f"{row['times']:g}",
                f"{row['ms']:,.1f}",
                *(f"{row[share]:.0%}" for share in ("share_of_peak", "share_of_bandwidth")),
            ]
            for row in evidence["products"]
            if row["ms"] >= total / 200
        ],
    )


def prices(evidence: Evidence) -> Iterator[str]:
    def setting(row: Evidence) -> str:
        return f"D{row['width']} T{row['tokens']} B{row['batch']}, {row['precision']}, {row['how']}"

    for title, rows in itertools.groupby(sorted(evidence["rows"], key=setting), setting):
        yield f"**{title}**"
        yield table(
            ["choice", "forward", "backward", "decoding a token"],
            [
                [row["choice"], *(figure(row["ratio"][part], ".2f") for part in ("forward", "backward", "decode"))]
                for row in rows
            ],
        )


def growth(evidence: Evidence) -> Iterator[str]:
    base = " ".join(f"{axis}{size}" for axis, size in evidence["base"].items())
    yield f"Around {base}, vocabulary {evidence['vocab']:,}, {evidence['precision']}, {evidence['threads']} threads."
    yield table(
        ["varied", "exponent", "largest step between neighbours, times what FLOPs say", "where"],
        [
            [name, f"{found['exponent']:.3f}", f"{found['largest_step']:.3f}", found["step_at"]]
            for name, found in evidence["summary"].items()
        ],
    )
    yield table(
        ["", "tokens/s", "seconds, times the base's", "FLOPs, times the base's"],
        [
            [
                f"{row['axis']} = {row['size']}, {row['how']}",
                figure(row["tokens_per_s"], ",.0f"),
                figure(row["seconds_of_base"]),
                f"{row['flops'] / base_flops:.3f}",
            ]
            for base_flops in [_base_flops(evidence)]
            for row in sorted(
                evidence["rows"], key=lambda row: (list(evidence["base"]).index(row["axis"]), row["size"])
            )
        ],
    )


def _base_flops(evidence: Evidence) -> float:
    return next(float(row["flops"]) for row in evidence["rows"] if row["size"] == evidence["base"][row["axis"]])


DECODING_TARGETS = {
    r".* float32 1 against nanogpt, step": ("at least", 15),
    r".* bf16 1 against nanogpt, step": ("at least", 20),
    r".* 1 against hugging-face, step": ("at least", 1.6),
    r".* 8 against hugging-face, step": ("at least", 1.3),
    r"time of nonlinear .* to linear": ("at most", 1.03),
    r"share of the bandwidth, .* 1": ("at least", 0.7),
}


def decoding(evidence: Evidence) -> Iterator[str]:
    """Names end in dtype and batch: `linear compiled bf16 1 against nanogpt, step`."""
    shape = evidence["shape"]
    yield (
        f"L{shape['n_layer']} D{shape['n_embd']} H{shape['n_head']} V{shape['vocab_size']}; a prompt of "
        f"{shape['prompt']}, then {shape['new']} new tokens; {evidence['threads']} threads; rounds: {shape['rounds']}. "
        "`step` is a new token of every sequence, `prompt` the reading of the prompt; the last number is the batch."
    )
    shares = {f"share of the bandwidth, {name}": of for name, of in evidence["rounds"]["bandwidth_share"].items()}
    rows = []
    for name, value in {**evidence["rounds"]["ratios"], **shares}.items():
        stated = [bound for pattern, bound in DECODING_TARGETS.items() if re.fullmatch(pattern, name)]
        rows += [Target(name, bound, how == "at most").row(value) for how, bound in stated]
        rows += [] if stated else [[name, figure(value, ".2f"), "", ""]]
    yield targets(rows)
    yield table(
        ["", "new tokens/s", "prompt, ms", "set-up, compilation included"],
        [
            [
                name,
                figure(int(name.split()[-1]) / of["step"], ",.1f"),
                figure(1e3 * of["prompt"], ",.0f") if "prompt" in of else "",
                f"{evidence['setup_seconds'][name]:.1f} s" if name in evidence["setup_seconds"] else "",
            ]
            for name, of in evidence["seconds"].items()
        ],
    )
    yield f"The memory reads {evidence['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s, measured after each turn."


def kernel(evidence: Evidence) -> Iterator[str]:
    if evidence["device"] != "cuda":
        yield "Without a GPU the Triton kernel is not timed, only checked; these are the ways that a CPU has."
    passes = {"forward": "forward", "forward_backward": "with backward"}
    yield table(
        [
            "rows, D, R, dtype",
            "way",
            *(f"{said}, µs and times the plain head's" for said in passes.values()),
            "first call",
        ],
        [
            [
                f"{row['rows']}, {row['d']}, {row['r']}, {row['dtype']}",
                way,
                *(
                    f"{row[name][way]['us']['median']:,.0f}; {figure(row[name][way]['to_reference'], '.2f')}"
                    for name in passes
                ),
                f"{first:.2f} s",
            ]
            for row in evidence["rows"]
            for way, first in row["first_call_seconds"].items()
        ],
    )


GPU_TARGETS = {
    ("train 124M", "MFU"): Target("MFU of our linear query at 124 M", 0.50),
    ("peer 124M", "linear / nanoGPT"): Target("our linear query at 124 M, times nanoGPT's tokens/s", 1.4),
    ("train 124M", "nonlinear / linear"): Target("the nonlinear query at 124 M, times our linear one's", 0.98),
}


def gpu(evidence: Evidence) -> Iterator[str]:
    if evidence["rehearsal"]:
        raise ValueError("a rehearsal on a CPU is no evidence of a GPU: remove it from results/")
    found = {(section, name): value for section, of in evidence["summary"].items() for name, value in of.items()}
    yield targets(target.row(found.get(where), ".3f") for where, target in GPU_TARGETS.items())
    others = {where: value for where, value in found.items() if where not in GPU_TARGETS}
    yield table(
        ["", "", "measured"], [[*where, figure(value, ".4g")] for where, value in others.items() if value is not None]
    )
    yield table(
        ["training", "", "tokens/s", "MFU", "peak memory"],
        [
            [
                row["section"],
                row["side"],
                figure(row["tokens_per_s"], ",.0f"),
                figure(row["mfu"]),
                f"{row['peak_bytes'] / 1e9:.1f} GB",
            ]
            for row in evidence["rows"]
            if "mfu" in row
        ],
    )
    yield table(
        ["decoding", "batch", "prompt, tokens/s", "new tokens/s"],
        [
            [
                row["side"],
                str(row["batch"]),
                figure(row["prefill_tokens_per_s"], ",.0f"),
                figure(row["decode_tokens_per_s"], ",.0f"),
            ]
            for row in evidence["rows"]
            if "decode_ms" in row
        ],
    )


def prepared(evidence: Evidence) -> Iterator[str]:
    memory, text, large = evidence["memory"], evidence["text"], evidence["large"]
    growth = evidence["memory_growth"]
    yield (
        f"{text['bytes'] / 1e6:,.0f} MB of text in {text['documents']:,} documents; {evidence['workers']} processes on "
        "each side."
    )
    yield targets(
        [
            Target("`qurve prepare`, times nanoGPT's route", 1.5).row(evidence["ratio_to_nanogpt"]),
            ["the same, with theirs loading the text too", figure(evidence["ratio_with_loading"], ".2f"), "", ""],
        ]
    )
    peaks = [("qurve", "once", text), ("qurve", "large", large), ("nanogpt", "once", text)]
    yield table(
        ["", "MB/s", "peak memory, all processes", "with the files they map"],
        [
            [
                f"{side}, {of['bytes'] / 1e6:,.0f} MB of text",
                figure(evidence["megabytes_per_s"][side], ".1f")
                if size == "once"
                else f"{of['bytes'] / 1e6 / of['seconds']:.1f}",
                *(f"{memory[side][size]['peak'][kind] / 1e6:,.0f} MB" for kind in ("own", "mapped")),
            ]
            for side, size, of in peaks
        ],
    )
    tenths = [own / 1e6 for own in memory["qurve"]["large"]["own_by_tenth"]]
    yield (
        f"With {large['bytes'] / text['bytes']:.0f} times the text our peak is {growth:.2f} times as high. Within the "
        f"long run memory stays: its median is {tenths[1]:,.0f} MB in the second tenth of the time, {tenths[7]:,.0f} "
        "MB in the eighth."
    )


def loaded(evidence: Evidence) -> Iterator[str]:
    yield f"The training it is compared with makes {evidence['training_rate']:,.0f} tokens/s."
    yield targets(
        [Target("the loader, times the training, at its slowest", 50).row(evidence["ratio_to_training"], ",.0f")]
    )
    yield table(
        ["", "order", "disk", "tokens/s", "times the training"],
        [
            [
                *(row[name] for name in ("shape", "order", "disk")),
                figure(row["tokens_per_s"], ",.0f"),
                f"{row['ratio_to_training']:,.0f}",
            ]
            for row in evidence["rows"]
        ],
    )


TRAINING_MISSED = """\
What is missed, and why. **The matrix peak**: products are seven to eight tenths of a step, near the peak each, as
the profiles show; the rest is attention, and what the compiler fuses: norms, GELU, softmax, casts. **Memory**:
weights, gradients and AdamW's moments are 16 bytes a parameter on every side, 2.0 GB at 124 M; ours saves logits
and half of the activations, and keeps freed memory from step to step, for speed, with holes in it. Recomputing
activations (`train.activation_checkpointing`) saves more and takes time; it is not in these figures."""
DECODING_MISSED = """\
What is missed, and why. **The bandwidth**: compiled, one sequence uses half to seven tenths of it; the arithmetic
of each column's sum, the choice of a token and Python between the products take the rest, and eager more of it.
**The nonlinear query**: its further steps cost time where nothing is compiled, which on a CPU is the case for
several sequences. **Prompts**: `generate` folds, stacks and casts the weights anew in each call, which for a short
prompt takes as long as reading it; a `Decoder` kept by the caller does so once."""

SECTIONS = (
    Section(
        "Training",
        "A step of training, from the batch to the updated weights: nanoGPT's model and the authors' (with their "
        "nonlinear query)\ncompiled in float32, as their own scripts train on a CPU, against ours compiled in bf16, "
        "where the processor multiplies it.\nEach side in a process of its own; peak memory is the whole process's, "
        "once it is compiled.",
        (("train-cpu*", training), ("train-profile*", where_time_goes)),
        TRAINING_MISSED,
    ),
    Section(
        "Price of the layer's choices",
        "Time of the query projection, fused with keys and values as a block has it, times that of the linear query.",
        (("prices-cpu", prices),),
    ),
    Section(
        "Growth of cost",
        "Cost must grow as the work grows. One size is varied at a time; an exponent of 1 is seconds in proportion to "
        "FLOPs, and a\ncliff would show as a largest step far above 1.",
        (("scaling-cpu", growth),),
    ),
    Section(
        "Decoding",
        "Reading the prompt and writing new tokens, told apart, with the same weights on both sides.",
        (("decode-cpu*", decoding),),
        DECODING_MISSED,
    ),
    Section(
        "Kernel",
        "The query's head, which is what follows the stem's product, in every way that it can be run, against its "
        "plain forward.",
        (("kernel*", kernel),),
    ),
    Section("GPU", "One script measures everything that is claimed of a GPU.", (("gpu-*", gpu),)),
    Section(
        "Data",
        "`qurve prepare` against nanoGPT's route (the package `datasets` maps tiktoken over the documents, then a loop "
        "writes the ids),\nand the batches of a training against the training itself.",
        (("prepare-cpu", prepared), ("loader-cpu", loaded)),
    ),
)


def main() -> None:
    text = page(ROOT / "results")
    if "--check" not in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        sys.exit(f"{PAGE.relative_to(ROOT)} does not say what results/ says; run: python tools/performance.py")


if __name__ == "__main__":
    main()
