"""The command that asks what a trained `f` does: interventions, probes, scale, and attention beside other runs'."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from rich.console import Console
from tyro.conf import Positional, UseAppendAction, arg

from qurve.cli.analyze.shared import as_text, check_out, finite, leave, name_of, show, untrained
from qurve.cli.shared import Device, Json, at_least, console_for, given, option, plain
from qurve.errors import BadInput
from qurve.runfolder import RunFolder

if TYPE_CHECKING:
    from qurve.analysis.mechanism import Window
    from qurve.analysis.probes import Concepts
    from qurve.model.gpt import GPT
    from qurve.study.worth import Table
    from qurve.train.config import RunConfig

T = TypeVar("T")

WINDOWS = 32
SEEDS = (0, 1, 2)
"""Of the random controls."""
GRADIENT_WINDOWS = 8
"""Windows that gradients and logits' degrees are taken on."""
RANDOM_CONCEPTS = 2


def mechanism(
    run: Annotated[Positional[Path], arg(metavar="RUN", help="A run's folder: its newest checkpoint is taken.")],
    against: Annotated[
        UseAppendAction[tuple[Path, ...]],
        option(
            metavar="RUN",
            help="Compare attention with this run's, on the same text; again for another. One of the same architecture "
            "and another seed is the yardstick.",
        ),
    ] = (),
    windows: Annotated[
        int,
        option(
            metavar="N",
            help="Windows of the validation data to judge on; as many others are fitted on. "
            f"Default: {WINDOWS}, or what there is.",
        ),
    ] = WINDOWS,
    data: Annotated[Path | None, option(metavar="DIR", help="Where the run's data is now.")] = None,
    out: Annotated[
        Path | None, option(metavar="DIR", help="Also leave mechanism.json, mechanism.html and its figures here.")
    ] = None,
    device: Device = None,
    as_json: Json = False,
) -> int:
    """What a trained f does: the loss without it, how much of it is linear, what can be read off it, how it scales."""
    at_least("--windows", windows, 2)
    check_out(out)
    from qurve.analysis.mechanism import queries_with_f

    console = console_for(as_json)
    say = plain(console)
    opened = _opened(run, data, windows, device)
    others = [(path, _other(path, opened)) for path in against]  # all refusals come first
    try:
        queries_with_f(opened.model)
        has_f = True
    except ValueError as why:
        say(f"{run}: {why}; only scale and attention are looked at")
        has_f = False
    tree: dict[str, Any] = {
        "run": str(run),
        "step": RunFolder(run).checkpoint_steps()[-1],
        "split": "val",
        "windows": len(opened.judged),
        "context": opened.config.model.context,
    }
    if has_f:
        tree |= _interventions(opened) | _probes(opened)
    tree |= _scale(opened)
    tree["attention"] = [_attention(opened, path, other) for path, other in others]
    if out is not None:
        from qurve.study.page.mechanism import figures, mechanism_page

        words = [f"Step {tree['step']:,}; {tree['windows']} windows of {tree['context']:,} tokens of validation text."]
        if not has_f:
            words.append("No block's query is an anchor plus an f: only scale and attention are looked at.")
        page = mechanism_page(f"What f does in {name_of(run)}", words, tree, tables(tree))
        leave(out, {"mechanism.json": as_text(tree), "mechanism.html": page, **figures(tree)}, say)
    if as_json:
        print(json.dumps(tree, allow_nan=False))
        return 0
    for table in tables(tree):
        show(table, console)
    return 0


# ------------------------------------------------------------------------------------------------------------ measuring


@dataclass(frozen=True)
class _Opened:
    run: Path
    data: Path | None
    config: RunConfig
    model: GPT
    start: GPT
    """The model before training."""
    fitted: list[Window]
    judged: list[Window]


def _opened(run: Path, data: Path | None, windows: int, device: str | None) -> _Opened:
    """The run's model, and windows of its validation data, every second one to fit on."""
    from qurve.data.order import fixed_eval_windows
    from qurve.generate.text import run_data
    from qurve.model.gpt import GPT
    from qurve.train.config import TrainConfig
    from qurve.train.resume import earlier_config
    from qurve.train.runtime import resolve_device
    from qurve.train.windows import batch

    config, start = earlier_config(RunFolder(run)), untrained(RunFolder(run))
    place = resolve_device(TrainConfig(**given(device=device)).device)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, device=place))
    model = finite(GPT.from_run(run), run).to(place)
    context, split = config.model.context, run_data(run, data).split("val")
    starts = fixed_eval_windows(len(split), context=context, count=2 * windows)
    tokens, needed = (len(starts) + 1) // 2 * context, config.model.d_model + 2
    if len(starts) < 4 or tokens < needed:
        raise BadInput(
            f"{len(starts)} windows of {context} tokens are too few: half of them are fitted on, which takes at least "
            f"{needed} tokens, and two others judged; give more --windows, or a run with more validation data"
        )
    parts = [batch(config, split, starts[n : n + 1], "val") for n in range(len(starts))]
    return _Opened(run, data, config, model, start.to(place), parts[::2], parts[1::2])


def _other(path: Path, opened: _Opened) -> GPT:
    """A run to compare with. `BadInput` where it cannot be, or was trained on other data."""
    from qurve.analysis.attention_patterns import check_comparable
    from qurve.model.gpt import GPT

    stated, own = (RunFolder(p).config_json()[0].get("data") or {} for p in (path, opened.run))
    if stated.get("fingerprint") != own.get("fingerprint"):
        raise BadInput(f"--against {path}: it was trained on other data than {opened.run}")
    other = finite(GPT.from_run(path), path)
    try:
        check_comparable(opened.model, other)
    except ValueError as why:
        raise BadInput(f"--against {path}: {why}") from None
    return other.to(opened.config.train.device)


def _interventions(opened: _Opened) -> dict[str, Any]:
    from qurve.analysis.mechanism import fit, interventions, linear_share, window_losses
    from qurve.study.paired import paired_interval

    fitted = fit(opened.model, opened.fitted)
    untouched = window_losses(opened.model, opened.judged)
    rows = []
    for one in _shown("interventions", interventions(opened.model, fitted)):
        losses = window_losses(opened.model, opened.judged, one.replace)
        mean, low, high = paired_interval([a - b for a, b in zip(losses, untouched, strict=True)])
        rows.append({"name": one.name, "layers": list(one.layers), "difference": mean, "low": low, "high": high})
    shares, at_start = (
        linear_share(model, found, opened.judged)
        for model, found in ((opened.model, fitted), (opened.start, fit(opened.start, opened.fitted)))
    )
    return {
        "loss": fmean(untouched),
        "fitted_on": len(opened.fitted),
        "interventions": rows,
        "linear_share": [
            {"layer": layer, "r2": _number(r2), "untrained": _number(at_start[layer])} for layer, r2 in shares.items()
        ],
    }


def _probes(opened: _Opened) -> dict[str, Any]:
    """Of the trained model and of its start."""
    concepts = _concepts(opened)
    return {
        "control_seeds": list(SEEDS),
        "probes": {
            name: _probed(model, concepts, opened)
            for name, model in _shown("probes", [("trained", opened.model), ("untrained", opened.start)])
        },
    }


def _probed(model: GPT, concepts: Concepts, opened: _Opened) -> dict[str, Any]:
    from qurve.analysis.probes import conjunctions, reweighting
    from qurve.study.paired import paired_interval

    pairs = []
    for pair in conjunctions(model, concepts, opened.fitted, opened.judged, SEEDS):
        row = dataclasses.asdict(pair)
        gain, low, high = paired_interval(row.pop("by_window"))
        pairs.append({**row, "gain": gain, "low": low, "high": high})
    return {
        "conjunctions": pairs,
        "reweighting": [
            dataclasses.asdict(one) for one in reweighting(model, concepts, opened.fitted, opened.judged, SEEDS)
        ],
    }


def _concepts(opened: _Opened) -> Concepts:
    """What the tokens' text says, where their tokenizer is known, and halves of the vocabulary at random."""
    from qurve.analysis.probes import random_concepts, text_concepts
    from qurve.generate.text import run_data, run_tokenizer

    vocabulary = opened.model.config.vocab_size
    found = random_concepts(vocabulary, RANDOM_CONCEPTS, seed=0)
    if run_data(opened.run, opened.data).tokenizer == "unknown":
        return found
    tokenizer = run_tokenizer(opened.run, opened.data)
    pieces = [tokenizer.decode_bytes([token]) for token in range(tokenizer.n_ids)]
    return {**text_concepts([*pieces, *[b""] * (vocabulary - len(pieces))]), **found}


def _scale(opened: _Opened) -> dict[str, Any]:
    from qurve.analysis.logit_growth import (
        effective_rate,
        invariant_parameters,
        logit_degree,
        radial_cosines,
        settled_turn,
    )

    model, training = opened.model, opened.config.train
    cosines = radial_cosines(model, opened.fitted[:GRADIENT_WINDOWS])
    matrices = []
    for layer, block in enumerate(model.blocks):
        invariant = invariant_parameters(model.config, layer)
        for name, parameter in block.get_submodule("attention").named_parameters():
            if parameter.dim() == 2:
                cosine = cosines[f"blocks.{layer}.attention.{name}"]
                matrices.append(
                    {
                        "layer": layer,
                        "name": name,
                        "invariant": name in invariant,
                        "radial_cosine": _number(cosine),
                        "rms": parameter.detach().double().square().mean().sqrt().item(),
                        "effective_rate": _number(effective_rate(parameter, training.lr)),
                    }
                )
    return {
        "lr": training.lr,
        "settled_turn": settled_turn(training.lr, training.weight_decay, training.beta1),
        "matrices": matrices,
        "degrees": [
            {name: _number(value) for name, value in dataclasses.asdict(one).items()}
            for one in logit_degree(model, opened.judged[:GRADIENT_WINDOWS])
        ],
    }


def _number(value: float) -> float | None:
    """As JSON has it: None for what is not finite, because there is nothing to measure."""
    return value if math.isfinite(value) else None


def _attention(opened: _Opened, path: Path, other: GPT) -> dict[str, Any]:
    from qurve.analysis.attention_patterns import compare_attention
    from qurve.study.paired import paired_interval

    blocks = []
    for block in compare_attention(opened.model, other, opened.judged):
        row = dataclasses.asdict(block)
        mean, low, high = paired_interval(row.pop("by_window"))
        blocks.append({**row, "mean": mean, "low": low, "high": high})
    return {"against": str(path), "same_architecture": other.config == opened.model.config, "blocks": blocks}


def _shown(what: str, parts: Sequence[T]) -> Iterator[T]:
    """One after the other; with a bar on a terminal, nothing in a log."""
    from rich.progress import track

    console = Console(stderr=True)
    return iter(track(parts, what, console=console, transient=True, disable=not console.is_terminal))


# --------------------------------------------------------------------------------------------------------------- tables


def tables(tree: dict[str, Any]) -> list[Table]:
    """What was found, for people; the JSON has every pair and concept."""
    found = []
    if "interventions" in tree:
        found += [_intervention_table(tree), _conjunction_table(tree), _reweighting_table(tree)]
    found.append(_scale_table(tree))
    if tree["attention"]:
        found.append(_attention_table(tree))
    return found


def _intervention_table(tree: dict[str, Any]) -> Table:
    from qurve.study.worth import Table

    every = max(len(row["layers"]) for row in tree["interventions"])
    r2 = {row["layer"]: f"{_told(row['r2'], '.3f')} ({_told(row['untrained'], '.3f')})" for row in tree["linear_share"]}
    rows = []
    for row in tree["interventions"]:
        layers = row["layers"]
        at = "all" if len(layers) == every > 1 and row["name"] != "swap" else " and ".join(map(str, layers))
        share = r2[layers[0]] if row["name"] == "linear" and len(layers) == 1 else ""
        rows.append([row["name"], at, f"{row['difference']:+.4f}", f"{row['low']:+.4f} to {row['high']:+.4f}", share])
    return Table(
        title="Something else in f's place",
        head=["f becomes", "in block", "loss", "95 % interval", "R²"],
        rows=rows,
        notes=[
            f"Nats per token more than the untouched model's {tree['loss']:.4f}, on {tree['windows']} windows of "
            f"validation text; intervals are over these windows, each for itself. Fitted on {tree['fitted_on']} "
            "others. R²: how much of f is linear in the block's input (and was before training); – where f is constant."
        ],
    )


def _conjunction_table(tree: dict[str, Any]) -> Table:
    from qurve.study.worth import Table

    rows = []
    for model, layer, pairs in _by_model_and_layer(tree, "conjunctions"):
        above = sum(pair["low"] > 0 and pair["q"] > max(pair["q_random"]) for pair in pairs)
        columns = [[pair[name] for pair in pairs] for name in ("x", "q", "q_shuffled")]
        columns.insert(2, [fmean(pair["q_random"]) for pair in pairs])
        rows.append([model, str(layer), *(f"{fmean(column):.3f}" for column in columns), f"{above} of {len(pairs)}"])
    return Table(
        title="Conjunctions of two concepts, read off linearly",
        head=["model", "block", "input", "query", "random", "shuffled", "gained"],
        rows=rows,
        notes=[
            "R², mean over the pairs, of what a conjunction is beyond its two concepts. Random: the query with f's "
            f"matrices turned at random, mean of {len(tree['control_seeds'])} seeds; shuffled: labels of other tokens. "
            "Gained: pairs whose query is above the input (its own 95 % interval; of as many tests some are so by "
            "chance) and above every random one."
        ],
    )


def _reweighting_table(tree: dict[str, Any]) -> Table:
    from qurve.study.worth import Table

    rows = []
    for model, layer, concepts in _by_model_and_layer(tree, "reweighting"):
        columns = [[concept[name] for concept in concepts] for name in ("spread", "turned", "by_concepts")]
        for control in ("random_matrices", "random_directions"):
            columns.append([fmean(concept[control]) for concept in concepts])
        rows.append([model, str(layer), *(f"{fmean(column):.3f}" for column in columns)])
    return Table(
        title="How differently the query answers to a concept from token to token",
        head=["model", "block", "spread", "turned", "by concepts", "random f", "random direction"],
        rows=rows,
        notes=[
            "Means over the concepts. Spread: standard deviation of the gain, whose mean is 1 (keys and values, which "
            "are linear: 0). Turned: share of the answer that is not along its mean. By concepts: R² of the gain by "
            "the concepts' labels. The last two are the spread with f's matrices turned at random, and in random "
            "directions."
        ],
    )


def _scale_table(tree: dict[str, Any]) -> Table:
    from qurve.study.worth import Table

    degrees = {row["layer"]: row for row in tree["degrees"]}
    rows = []
    for layer, group in itertools.groupby(tree["matrices"], key=lambda row: row["layer"]):
        for place, row in enumerate(group):
            degree = _told(degrees[layer]["together"], ".2f") if layer in degrees and not place else ""
            cosine = "" if row["radial_cosine"] is None else f"{row['radial_cosine']:+.4f}"
            invariant = "yes" if row["invariant"] else ""
            figures = (f"{row['rms']:.4f}", _told(row["effective_rate"], ".4f"))
            rows.append([row["name"], str(layer), cosine, invariant, *figures, degree])
    return Table(
        title="Scale",
        head=["matrix", "block", "radial cosine", "invariant", "size", "turn", "degree"],
        rows=rows,
        notes=[
            "Radial cosine: of the matrix and its gradient, 0 where the loss does not depend on its size. Size: root "
            f"mean square. Turn: radians an update at the peak rate {tree['lr']:g} turns it by, about; a "
            f"scale-invariant one settles at {tree['settled_turn']:.4f} under its decay. Degree: the largest logit "
            "grows with this power of all matrices of queries and keys (2 where both are linear)."
        ],
    )


def _attention_table(tree: dict[str, Any]) -> Table:
    from qurve.study.worth import Table

    rows = []
    for other in tree["attention"]:
        name, kind = "/".join(Path(other["against"]).parts[-2:]), "same" if other["same_architecture"] else "other"
        for block in other["blocks"]:
            interval = f"{block['low']:.3f} to {block['high']:.3f}"
            entropies = (f"{fmean(block[name]):.2f}" for name in ("entropy", "partner_entropy"))
            rows.append([name, kind, str(block["layer"]), f"{block['mean']:.3f}", interval, *entropies])
    return Table(
        title="Attention beside other runs'",
        head=["against", "model", "block", "apart", "95 % interval", "entropy", "its"],
        rows=rows,
        notes=[
            "Apart: Jensen-Shannon divergence of attention weights in bits, 0 alike, 1 disjoint, mean over matched "
            "heads and tokens. Entropies, ours and its, in bits. What is found against the same model with another "
            "seed is the yardstick for another model."
        ],
    )


def _told(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _by_model_and_layer(tree: dict[str, Any], what: str) -> Iterable[tuple[str, int, list[dict[str, Any]]]]:
    for model, found in tree["probes"].items():
        for layer, group in itertools.groupby(found[what], key=lambda row: row["layer"]):
            yield model, layer, list(group)
