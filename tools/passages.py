"""Write the guide's measured passages anew from `results/`; `--check` only says whether they are as they should be.

    python tools/passages.py [--check]

A passage stands between `<!-- name -->` and `<!-- /name -->`.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import theory

ROOT = Path(__file__).parents[1]


def evidence(name: str) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return tree


def small_compare() -> str:
    study = evidence("small-compare")
    runs, rows = study["runs"], study["rows"]
    lines = [
        "| arm | N.E. parameters | peak rate, floor | validation loss | difference to the baseline, 95 % interval "
        "| ΔLL | ΔPPX | tokens/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        train = study["configs"][row["arm"]]["train"]
        interval = "reference"
        gains = ("", "")
        if row["diff"] is not None:
            interval = f"{row['diff']:+.4f} ({row['diff_low']:+.4f} to {row['diff_high']:+.4f})"
            gains = f"{row['dll_percent']:+.2f} %", f"{row['dppx_percent']:+.2f} %"
        lines.append(
            f"| {row['arm']} | {row['non_embedding']:,} | {train['lr']:g}, {train['min_lr']:g} | {row['val_loss']:.4f} "
            f"| {interval} | {gains[0]} | {gains[1]} | {row['tokens_per_s']:,.0f} |"
        )
    train = study["configs"][rows[0]["arm"]]["train"]
    start = statistics.fmean(run["val"][0][1] for run in runs)
    seeds = len({run["seed"] for run in runs})
    words = (
        f"{seeds} seeds, {train['steps']} steps of {train['tokens_per_step']:,} tokens of presidential addresses, "
        f"in 2,048 BPE ids; nats per token; the loss starts at {start:.2f}. Each arm trains at the rate and floor that "
        f"the same search found best for it. Verdict: *{study['verdict']}*"
    )
    return "\n".join([*lines, "", words])


def train_cpu() -> str:
    small, paper, decoding = (evidence(name) for name in ("train-cpu", "train-cpu-124m", "decode-cpu"))
    shape, ratios, side = small["shape"], decoding["ratios"], "nonlinear compiled"
    return (
        f"Training on {shape['threads']} cores with avx512_bf16, compiled, our linear query runs at "
        f"{times(small['rounds']['ratio_to_nanogpt'])} at L{shape['layers']} D{shape['width']} T{shape['context']} and "
        f"{times(paper['rounds']['ratio_to_nanogpt'])} at the paper's 124 M shape (medians, quartiles in brackets); "
        f"the nonlinear query at {middle(small['rounds']['ratio_nonlinear_to_linear'])} and "
        f"{middle(paper['rounds']['ratio_nonlinear_to_linear'])} of the linear one's. Writing 512 tokens with the "
        f"nonlinear query, `generate` is {ratios[f'{side} float32 1 against nanogpt, step']:.1f} times as fast as "
        f"nanoGPT's in float32, and {ratios[f'{side} bf16 1 against nanogpt, step']:.1f} times in bf16. "
        "[All figures](docs/performance.md), and the targets that were missed."
    )


def times(ratios: list[float]) -> str:
    low, high = quartile(ratios, 0), quartile(ratios, 2)
    return f"**{statistics.median(ratios):.2f} times nanoGPT's** tokens/s ({low:.2f} to {high:.2f})"


def middle(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({quartile(ratios, 0):.3f} to {quartile(ratios, 2):.3f})"


def quartile(values: list[float], which: int) -> float:
    return statistics.quantiles(values, method="inclusive")[which]


def checkpoint_cost() -> str:
    found = evidence("checkpoint-cost")
    run, paper = found["run"], found["paper"]
    return (
        f"They are written while training waits. Measured for `{found['preset']}` ({run['bytes'] / 1e6:.1f} MB a "
        f"checkpoint, one after {run['steps_between']} steps, {run['threads']} thread): "
        f"{1000 * run['save_seconds']:.0f} ms each, **{100 * run['share']:.2f} % of the training time** "
        f"({len(run['saves'])} saves). The paper's 124-million-parameter model takes {paper['bytes'] / 1e9:.2f} GB and "
        f"{paper['save_seconds']:.1f} s on the same machine, every 1,000 steps: below 1 % as long as a step "
        f"takes more than {paper['save_seconds'] / 10:.1f} s."
    )


def deterministic_cpu() -> str:
    found = evidence("deterministic-cpu")
    words = []
    for how in ("eager", "compiled"):
        ratios = found["rounds"][how]
        words.append(
            f"{how} {statistics.median(ratios):.3f} (quartiles {quartile(ratios, 0):.3f} and {quartile(ratios, 2):.3f})"
        )
    shape = found["shape"]
    return (
        "What that costs, as the time of a training step with it over that of one without "
        f"(L{shape['layers']} D{shape['width']} T{shape['context']} B{shape['batch']}, {shape['threads']} threads, "
        f"{len(found['rounds']['eager'])} alternated rounds): {'; '.join(words)}."
    )


def torture() -> str:
    found = evidence("torture")
    kills, survived, finished = found["kills"], found["survived"], found["runs_finished"]
    return (
        f"`make torture`: {kills} processes were killed (SIGKILL), {found['in_a_save']} of them in or around a save; "
        f"**{survived} of {kills} kills were survived**. After each, the newest checkpoint was whole and `latest` led "
        f"to it, and each of the {finished} runs that came to their end equalled one that was left alone, in every "
        "metric and every bit of weights and optimiser."
    )


def absorbed() -> str:
    words = []
    for name, skips in (("absorbed-cpu", "without skips"), ("absorbed-attention-cpu", "a skip over attention alone")):
        found = evidence(name)
        sides, shape = found["sides"], found["shape"]
        start = sides["as it is"]["parameters"]
        for side, ratio in found["ratios"].items():
            own = sides[side]
            words.append(
                f"- {skips}, {'compiled' if shape['compile'] else 'eager'}, `{side}`: "
                f"{start - own['parameters']:,} of {start:,} parameters fewer, {ratio['median']:.3f} of the time "
                f"({ratio['low']:.3f} to {ratio['high']:.3f}); logits differ by {own['difference_float64']:.0e} of the "
                f"largest in float64, {own['difference_float32']:.0e} in float32"
            )
    return (
        f"Decoding one sequence with norm-free models at L{shape['layers']} D{shape['width']}, float32, "
        f"{found['threads']} threads, beside the model as it is (ratios within a round, medians and quartiles):\n\n"
        + "\n".join(words)
    )


def dynamics_overhead() -> str:
    found = evidence("dynamics-overhead-cpu")
    share, step = found["summary"]["share_at_every_100"], found["summary"]["step_seconds"]["median"]
    return (
        f"For `small/res-gelu` on {found['machine']['cores']} cores, {len(found['rows'])} alternated rounds: at every "
        f"100 steps **{100 * share['median']:.1f} % of the training time** (quartiles {100 * share['low']:.1f} and "
        f"{100 * share['high']:.1f} %; a step takes {1000 * step:.0f} ms)."
    )


def hulls() -> str:
    found = evidence("hulls-cpu")
    peaks = [part["peak_bytes"] / 2**30 for part in found["parts"]]
    return (
        f"Measured for `{found['preset']}`, {found['parameters']:,} parameters as they start, on {found['tokens']:,} "
        f"tokens: {found['cpu_seconds'] / 3600:.1f} hours of processor time on {found['threads']} threads, "
        f"{found['spectra_seconds']:.0f} s for the spectra at the end; at most {max(peaks):.2f} GiB, and in the last "
        f"{len(peaks)}th of the tokens {found['memory_ratio']:.3f} of what the first took."
    )


def retrofitted() -> str:
    found = evidence("retrofit")
    plan, summary, base = found["plan"], found["summary"], found["base"]
    lines = [
        "| | trained parameters | peak rate | validation text | test text |",
        "|---|---|---|---|---|",
        f"| as pretrained | | | {base['val']:.4f} | {base['test']:.4f} |",
    ]
    for arm, one in summary["arms"].items():
        runs = [run for run in found["runs"] if run["arm"] == arm and run["seed"] in plan["seeds"]]
        val, test = (statistics.fmean(run[split] for run in runs) for split in ("val", "test"))
        lines.append(f"| {one['label']} | {one['parameters']:,} | {one['rate']:g} | {val:.4f} | {test:.4f} |")
    words = (
        f"SmolLM2-135M on English prose: {plan['steps']} steps of {plan['batch']} times {plan['length']} tokens, the "
        f"best of {len(plan['rates'])} peak rates for each arm on a seed of its own, then means over {summary['n']} "
        f"seeds; nats per token on {plan['held_out']} windows each. Adapter minus LoRA on test text, paired by seed: "
        f"**{summary['diff']:+.4f}** ({summary['diff_low']:+.4f} to {summary['diff_high']:+.4f}, 95 %)."
    )
    return "\n".join([*lines, "", words])


def what_was_found() -> str:
    return theory.passage(evidence("theory"))


PASSAGES = {
    "README.md": {"small-compare": small_compare, "train-cpu": train_cpu},
    "docs/reliability.md": {
        "checkpoint-cost": checkpoint_cost,
        "deterministic-cpu": deterministic_cpu,
        "torture": torture,
    },
    "docs/retrofit.md": {"retrofit": retrofitted},
    "docs/runs.md": {"dynamics-overhead": dynamics_overhead},
    "docs/theory.md": {"theory": what_was_found, "absorbed": absorbed, "hulls": hulls},
}


def rewritten(file: str, text: str) -> str:
    for name, passage in PASSAGES[file].items():
        pattern = re.compile(rf"<!-- {name} -->\n.*?<!-- /{name} -->", re.DOTALL)
        if not pattern.search(text):
            sys.exit(f"{file} has no passage {name!r}")
        before, after = pattern.split(text)[0], pattern.split(text)[-1]
        text = f"{before}<!-- {name} -->\n{passage()}\n<!-- /{name} -->{after}"
    return text


def main() -> None:
    for file in PASSAGES:
        text = (ROOT / file).read_text(encoding="utf-8")
        new = rewritten(file, text)
        if "--check" not in sys.argv:
            (ROOT / file).write_text(new, encoding="utf-8")
        elif new != text:
            sys.exit(f"{file} does not say what results/ says; run: python tools/passages.py")


if __name__ == "__main__":
    main()
