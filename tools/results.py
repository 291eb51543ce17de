"""Write `docs/results.md` anew from the experiments' evidence in `results/`; `--check` only says whether it is up to
date.

    python tools/results.py [--check]

A section is an entry of `SECTIONS`. One whose evidence is not there yet says that it was not run: nothing is left out
for what came of it, and no figure on the page is written by hand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from results_parts import (
    Evidence,
    ablations,
    at_open_edges,
    at_the_peak,
    beside,
    context,
    doubted,
    fair_search,
    figure2,
    ladder,
    made_again,
    noise_floor,
    quarter_hour,
    read,
    stability,
    table1,
    wrapped,
)

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"

Parts = Callable[[Path], Iterator[str]]

HEAD = """\
# What came out

Every experiment of `experiments/`, whatever came of it: the question, what was run, the figures, the verdict, and what
it does not say. This page is generated from `results/`; [how to make that anew](../REPRODUCE.md).

Losses are nats per token; a difference is the arm's loss less the baseline's, paired by seed, so that a negative one is
a gain. Its interval is the arm's own 95 % t interval. p is the paired t test's, then corrected by Holm for all arms of
the study: an arm is called lower or higher when that one is at most 5 %. [How this is decided](compare.md).

All of this is about models of a million parameters or fewer, trained for minutes on presidential addresses, unless a
section says otherwise. The paper's models are far larger and saw far more text: nothing here confirms or refutes what
was measured at that scale. Every experiment has the paper's scale as well (`PAPER` in its file), planned and not run.

A commit with `+changes` is one whose working tree had changes when the runs were made. Speeds are of a machine that had
other work as well.
"""


@dataclass(frozen=True)
class Section:
    title: str
    file: str
    """In `results/`."""
    question: str
    parts: Parts
    """What was found: tables and sentences."""
    unsaid: str
    missing: str = "**Not run yet**"


def page(results: Path) -> str:
    return "\n".join([HEAD, *(text for section in SECTIONS for text in _section(section, results))])


def _section(section: Section, results: Path) -> Iterator[str]:
    yield f"## {section.title}\n\n{wrapped(section.question)}\n"
    file = results / section.file
    if not file.exists():
        yield wrapped(f"{section.missing}: `{section.file}` is not among the results.") + "\n"
        return
    yield f"*`results/{section.file}`: {_what_was_run(read(file))}.*\n"
    yield from (text + "\n" for text in (*section.parts(file), *made_again(file)))
    yield from (text + "\n" for text in beside(read(file)))
    yield from (text + "\n" for text in doubted(read(file)))
    unsaid = " ".join([section.unsaid, *at_open_edges(read(file))])
    yield wrapped(f"**What it does not say.** {unsaid}") + "\n"


def _what_was_run(evidence: Evidence) -> str:
    """Command, scale, seeds and machine, as far as the evidence has them."""
    seeds, said = evidence.get("seeds"), [f"`{evidence['command']}`"]
    if "scale" in evidence:
        said.append(evidence["scale"])
    if seeds:
        said.append(f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''} ({', '.join(map(str, seeds))})")
    origin = evidence.get("origin") or {}
    if (train := origin.get("config", {}).get("train", {})).get("lr"):
        high, low = train["lr"], train["min_lr"]
        said.append(f"the baseline's rate {high:g}" + (", held" if high == low else f" to {low:g}"))
    machines = [evidence.get("machine") or {}, *(rung["machine"] for rung in evidence.get("rungs", ()))]
    machine = max(machines, key=len)
    commits = sorted({f"commit {one['commit']}" for one in machines if "commit" in one})
    named = [machine.get("gpu") or machine.get("cpu"), machine.get("torch") and f"torch {machine['torch']}"]
    named += origin.get("code", commits)
    return "; ".join([*said, *(", ".join(name) if isinstance(name, list) else name for name in named if name)])


SECTIONS = (
    Section(
        "The noise floor",
        "noise-floor.json",
        "How far do two trainings of the same model part? A baseline and an A/A arm, which is the same on the same "
        "batches from other weights: whatever differs is noise, and an effect has to be seen above it.",
        noise_floor,
        "The noise of another size, length or rate, or of a rate that decays. Arms that share weights besides the "
        "batches may pair better than the A/A arm, and architectures far from the baseline worse. A study of several "
        "arms needs more seeds.",
    ),
    Section(
        "Best against best",
        "fair-search.json",
        "Is the gain real when every arm has the same search? The paper's baseline was trained at one rate, its "
        "layer after a search of at least 31 configurations. Here each arm has the same grid of peaks and floors, "
        "chosen on validation and reported on test with fresh seeds.",
        fair_search,
        "Whether a gain or its absence at this size holds at the paper's; whether a finer or a wider grid would "
        "change an arm's best point.",
    ),
    Section(
        "Peak and floor apart",
        "controls.json",
        "The paper's variant was trained at four to seven times its baseline's peak, and down to other floors. What do "
        "the baseline and wider MLPs do there? Each arm is tried at all of the published peaks and floors, multiplied "
        "by one factor, which brings the baseline's peak to its best here. The baseline itself takes as many FLOPs as "
        "the layer and nearly as many parameters; one MLP is as wide as takes the layer's seconds.",
        fair_search,
        "What suits each arm: the published floors are lower than any arm chooses at this length (see best against "
        "best). How long a step takes was measured on one thread of this machine, and differs elsewhere.",
    ),
    Section(
        "Everybody at the layer's peak",
        "at-the-peak.json",
        "Who bears the published peak? Every arm at the point that the paper found best for its layer, its peak and "
        "floor times the same factor: six times the baseline's peak.",
        at_the_peak,
        "Which arm is better at its own best: that is best against best. The point was published for the layer, and "
        "suits none of these trainings: all arms end higher there than at the baseline's peak.",
    ),
    Section(
        "Table 1",
        "table1.json",
        "What do the paper's own six rows give here, each at its published rate, floor and decay? Peaks and "
        "floors are all multiplied by one factor, which brings the baseline's peak to its best here.",
        table1,
        "Which architecture is better: the rows differ in rates as well, as they do in the paper. That a row "
        "trains or breaks at rates scaled by one factor says nothing of the paper's scale, where the rates are "
        "other ones.",
    ),
    Section(
        "Figure 2",
        "figure2.json",
        "How does the gain run along the training, over several of the published settings? The paper saw high "
        "gains at the beginning, which settle later.",
        figure2,
        "A gain before the end is one at an unfinished schedule: it compares rates as much as architectures. "
        "Settings are the published ones, and named by their published rates; they were trained at 3.3 times these, so "
        "that the baseline's is its own. None was searched here.",
    ),
    Section(
        "Stability",
        "stability.json",
        "What rates and decays does each architecture tolerate, and what is seen of the published claims at this "
        "scale? A point diverges, ends no lower than it started, ends on a plateau well above its architecture's best, "
        "or is stable.",
        stability,
        "What happens late in a long training, of which the claims speak: these runs are far shorter, so that they "
        "test neither that something is stable there nor that it diverges. One seed a point, and a bound of 0.1 nats "
        "on its loss: a map of where to look, no test.",
    ),
    Section(
        "Which parts matter",
        "ablations.json",
        "Each choice of the layer changed alone: width, activation, norms, eps, anchor, scale, and the layer in "
        "keys, values and all three.",
        ablations,
        "Whether a finer or wider search would change an arm's rate: one seed chose it, and a choice that others do "
        "not bear out shows in the arms at the baseline's point. With this many arms, Holm's correction finds large "
        "effects alone, and these trainings are half as long as those above.",
    ),
    Section(
        "Other surroundings",
        "context.json",
        "Does the gain hold with rotary positions, with an output gate, in a modern block, and is it as large as "
        "what rotary positions bring?",
        context,
        "No search was made for other surroundings, so each is judged at the rate that suits the first; and no rate "
        "decays.",
    ),
    Section(
        "Along size and length",
        "ladder.json",
        "Does the gain grow or shrink with the model, and with the training? Primer, whose gain is said to "
        "shrink, and QK-norm go along.",
        ladder,
        "Anything beyond the sizes and lengths in the table: a slope over a tenfold range of tiny models is no "
        "forecast for one a thousand times as large. Rates were found at 0.8 M parameters and kept. They do not decay, "
        "as the searches chose, so that a longer training is nearly the shorter one continued, where a schedule that "
        "decays would be another. Each scale counts once: with three, only a slope far above its bends can be told. "
        "That Primer's gain shrinks was not seen.",
    ),
    Section(
        "Ten minutes of a GPU",
        "quarter-hour-gpu.json",
        "An equal search over four rates, and as many seeds as ten minutes of one large GPU hold, at 11 M "
        "parameters on 10 M tokens of prose.",
        quarter_hour,
        "One seed chose the rates, and a run sees about one token for each parameter, where twenty are usual: a "
        "beginning, no answer.",
        missing="**No GPU has run it.** It is rehearsed on a CPU at toy size, on invented tokens",
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page is not up to date")
    check, text = parser.parse_args().check, page(ROOT / "results")
    if not check:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        sys.exit(f"{PAGE.relative_to(ROOT)} does not say what results/ says; run: python tools/results.py")


if __name__ == "__main__":
    main()
