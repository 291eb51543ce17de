"""Write the zoo's page and figure anew from `results/{zoo,self-similarity}.json`; `--check` only says whether they are
up to date.

    qurve compare zoo --out runs/zoo && cp runs/zoo/report/evidence.json results/zoo.json
    python experiments/self_similarity.py --zoo runs/zoo && python tools/zoo.py

The sentences on the arms are those of `qurve.presets.zoo`. Evidence of other arms, or of other models, is refused.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from qurve import accounting, presets
from qurve.config import differences, from_dict
from qurve.errors import QurveError
from qurve.model.config import ModelConfig
from qurve.presets import zoo

ROOT = Path(__file__).parents[1]
FIGURE = "images/zoo.svg"

PAGE = """\
# The zoo: one of each

    qurve compare zoo

trains one small model of every kind of projection, mixer and residual scheme. It shows that each of them trains, and
what it costs. **It ranks nothing**: there is one run of each (seed {seed}), at the rate that a search found best for
the baseline ({rate:g}), and no search was made for the others. Which differences are real is for a comparison with
several seeds to say: `qurve compare small/baseline --grid …`. `qurve train zoo/NAME` trains one.

{steps} steps of {tokens:,} tokens of presidential addresses, in 2,048 BPE ids; {layers} blocks, {width} wide.
Parameters are those without embeddings; FLOPs are forward and backward, per token; the loss is on the validation
split, in nats per token, and starts at {start:.2f}. Tokens/s were taken as the runs went, two at a time and once each:
arms of equal FLOPs differ by up to a third. {machine}.

{tables}

![Validation loss of each arm]({figure})

*An arm called MLP is the baseline with its feed-forward as wide as it takes to have the parameters of another one.*

## The term x · x'

With identity anchors in queries and keys the attention's logits have a term without weights, which draws tokens to
those like themselves (arXiv 2603.13381, section 1). What share of the logits' variance it makes up (parts of all terms
add up to 1; beyond it, they cancel), its correlation with them, and the mean weight of a token on itself, over
{windows} windows of validation text (`qurve.analysis.self_similarity`):

| arm | | share | correlation | weight on itself |
|---|---|---|---|---|
{similarity}
"""


def arms(evidence: dict[str, Any]) -> list[dict[str, Any]]:
    """What the page says of each arm. Raises `QurveError` where the evidence is of something else than the code."""
    rows = {row["arm"]: row for row in evidence["rows"]}
    expected = list(zoo.arms(presets.get("zoo/baseline").model))
    if missing := {arm.name for arm in expected} ^ rows.keys():
        raise QurveError(f"the zoo and its evidence have different arms: {', '.join(sorted(missing))}")
    found = []
    for arm in expected:
        made = from_dict(ModelConfig, evidence["configs"][arm.name]["model"])
        if changed := differences(made, arm.model):
            raise QurveError(f"the evidence of {arm.name} is of another model: {changed}")
        told = {"group": arm.group, "label": arm.label, "sentence": arm.sentence}
        found.append({**rows[arm.name], **told, "cost": accounting.count(arm.model)})
    return found


def page(evidence: dict[str, Any], similarity: dict[str, Any]) -> str:
    rows, run = arms(evidence), evidence["runs"][0]
    config, machine = evidence["configs"][rows[0]["arm"]], run["environment"]
    size = rows[0]["cost"].non_embedding
    tables = []
    for group, members in itertools.groupby(rows, lambda row: row["group"]):
        lines = [
            f"## {group}",
            "",
            "| arm | what it is | parameters | FLOPs | tokens/s | loss |",
            "|---|---|---|---|---|---|",
        ]
        for row in members:
            more = 100 * (row["cost"].non_embedding / size - 1)
            change = f" ({more:+.1f} %)" if abs(more) >= 0.05 else ""
            lines.append(
                f"| {row['label']}<br>`zoo/{row['arm']}` | {row['sentence']} | {row['cost'].non_embedding:,}{change} "
                f"| {row['cost'].flops_per_token / 1e6:.2f} M | {figure_of(row['tokens_per_s'], ',.0f')} "
                f"| {figure_of(row['val_loss'], '.3f')} |"
            )
        tables.append("\n".join(lines))
    return PAGE.format(
        seed=run["seed"],
        rate=config["train"]["lr"],
        steps=config["train"]["steps"],
        tokens=config["train"]["tokens_per_step"],
        layers=config["model"]["n_layers"],
        width=config["model"]["d_model"],
        start=run["val"][0][1],
        machine=f"{machine['cpu'] or machine['gpu']}, threads: {machine['threads']}, torch {machine['torch']}",
        tables="\n\n".join(tables),
        figure=FIGURE,
        windows=similarity["windows"],
        similarity="\n".join(similarity_lines(similarity)),
    )


def similarity_lines(evidence: dict[str, Any]) -> Iterator[str]:
    for arm, measured in evidence["arms"].items():
        for when, title in (("start", "at the start"), ("trained", f"after {measured['steps']} steps")):
            figures = (measured[when][name]["mean"] for name in ("share", "correlation", "self_weight"))
            yield f"| `zoo/{arm}` | {title} | {' | '.join(f'{figure:.3f}' for figure in figures)} |"


def figure_of(value: float | None, form: str) -> str:
    return "diverged" if value is None else format(value, form)


LEFT, WIDTH, ROW = 240, 760, 18


def figure(evidence: dict[str, Any]) -> str:
    """A dot an arm, by its loss; the line is the baseline."""
    rows = arms(evidence)
    losses = [row["val_loss"] for row in rows if row["val_loss"] is not None]
    low, high = min(losses), max(losses)
    margin = 0.05 * (high - low) or 1.0
    low, high = low - margin, high + margin

    def x(loss: float) -> str:
        return f"{LEFT + (WIDTH - LEFT - 60) * (loss - low) / (high - low):.1f}"

    height = ROW * (len(rows) + 3)
    base = x(rows[0]["val_loss"])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="{ROW - 4}" fill="#444">validation loss, nats per token: one seed, no ranking</text>',
        f'<path d="M{base} {ROW}V{height - ROW}" stroke="#999" stroke-dasharray="3 3"/>',
    ]
    for place, row in enumerate(rows):
        y = ROW * (place + 1.8)
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(row["label"])}</text>')
        if row["val_loss"] is None:
            parts.append(f'<text x="{LEFT}" y="{y + 4:.1f}" fill="#b00">diverged</text>')
            continue
        at = x(row["val_loss"])
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - 60}" stroke="#eee"/>')
        parts.append(f'<circle cx="{at}" cy="{y:.1f}" r="4" fill="#2a6f97"/>')
        parts.append(f'<text x="{WIDTH - 52}" y="{y + 4:.1f}">{row["val_loss"]:.3f}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    files = (ROOT / "results" / "zoo.json", ROOT / "results" / "self-similarity.json")
    evidence, similarity = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    texts = {ROOT / "docs" / "zoo.md": page(evidence, similarity), ROOT / "docs" / FIGURE: figure(evidence)}
    for file, text in texts.items():
        if "--check" not in sys.argv:
            file.write_text(text, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != text:
            sys.exit(f"{file.relative_to(ROOT)} does not say what results/zoo.json says; run: python tools/zoo.py")


if __name__ == "__main__":
    try:
        main()
    except QurveError as error:
        sys.exit(str(error))
