"""The command that measures how far queries, keys and values leave the flat subspace of a linear pathway."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from tyro.conf import FlagCreatePairsOff, Positional, arg

from qurve.cli.analyze.shared import as_text, check_out, finite, leave, name_of, show, untrained
from qurve.cli.shared import Device, Json, at_least, console_for, given, option, plain, progress_bar
from qurve.errors import BadInput
from qurve.runfolder import RunFolder

if TYPE_CHECKING:
    import numpy as np
    import torch

    from qurve.analysis.conditioning import Conditioning
    from qurve.analysis.curvature import Curvature
    from qurve.analysis.hull import LayerHull
    from qurve.analysis.spectrum import Spectrum
    from qurve.data.loader import TokenSplit
    from qurve.model.gpt import GPT
    from qurve.study.worth import Table

TOKENS = 32_768
PASS_TOKENS = 4_096
"""Tokens of one forward pass."""
CURVATURE_TOKENS = 2_048
"""Curvature takes some forty evaluations of each projection a token."""
ROUNDING = 1e-9
"""What bends in a linear pathway is below."""
SHORT = {
    "bent": "bent",
    "participation_ratio": "PR",
    "participation_ratio_of_f": "PR of f",
    "second_difference": "2nd difference",
}
"""Figures where a terminal has little room."""
ASSOCIATED: dict[str, Callable[[dict[str, Any]], str]] = {
    "arms": lambda found: str(len(found["points"])),
    "correlation": lambda found: f"{found['correlation']:+.2f}",
    "p": lambda found: f"{found['p']:.3f}",
}
"""Columns of the table of associations."""


def geometry(
    run: Annotated[
        Positional[Path], arg(metavar="RUN", help="A run's folder, or a study's: then also what goes with its gains.")
    ],
    tokens: Annotated[
        int, option(metavar="N", help=f"Tokens of the validation data to take. Default: {TOKENS:,}, or what there is.")
    ] = TOKENS,
    every_checkpoint: Annotated[
        FlagCreatePairsOff[bool],
        option(help="Measure the model before training and each checkpoint that was kept, not the newest alone."),
    ] = False,
    data: Annotated[Path | None, option(metavar="DIR", help="Where the run's data is now.")] = None,
    out: Annotated[
        Path | None,
        option(metavar="DIR", help="Also leave geometry.json, geometry.html and its figures here."),
    ] = None,
    device: Device = None,
    as_json: Json = False,
) -> int:
    """The affine hull of queries, keys and values, its spectrum and curvature, and Jacobians' condition numbers."""
    at_least("--tokens", tokens, 1)
    check_out(out)
    from qurve.train.config import TrainConfig
    from qurve.train.runtime import resolve_device

    place = resolve_device(TrainConfig(**given(device=device)).device)
    console = console_for(as_json)
    if (run / "study.json").exists():
        if every_checkpoint:
            raise BadInput("--every-checkpoint is for a run; of a study's runs the newest checkpoints are taken")
        tree = _study(run, tokens, data, place)
        if not as_json:
            for table in _study_tables(tree):
                show(table, console)
        if out is not None:
            from qurve.study.page import gains

            words = [
                "The newest checkpoint of every finished run, each figure its mean over the blocks; "
                f"{tokens:,} tokens of validation text, or what there is."
            ]
            page = gains.gains_page(f"Geometry and gains of {name_of(run)}", words, tree, _study_tables(tree))
            leave(out, {"geometry.html": page, **gains.figures(tree)}, plain(console))
    else:
        found = _run(run, tokens, data, place, console, every_checkpoint)
        tree = {"run": str(run), "checkpoints": [checkpoint.tree() for checkpoint in found]}
        if not as_json:
            for table in _tables(found):
                show(table, console)
        if out is not None:
            from qurve.study.page.geometry import figures, geometry_page

            words = [f"Step {found[-1].step:,}; {found[-1].tokens:,} tokens of validation text."]
            training = [(checkpoint.step, checkpoint.hulls) for checkpoint in found]
            page = geometry_page(f"Geometry of {name_of(run)}", words, training, _tables(found))
            leave(out, {"geometry.html": page, **figures(training)}, plain(console))
    leave(out, {"geometry.json": as_text(tree)}, plain(console))
    if as_json:
        print(json.dumps(tree, allow_nan=False))
    return 0


# ------------------------------------------------------------------------------------------------------------ measuring


@dataclass(frozen=True)
class Checkpoint:
    """What was measured of one checkpoint."""

    step: int
    tokens: int
    hulls: list[LayerHull]
    curvatures: list[Curvature]
    conditionings: list[Conditioning]

    def tree(self) -> dict[str, Any]:
        from qurve.analysis.spectrum import TOLERANCE

        layers = []
        for hull in self.hulls:
            bends = {c.pathway: _numbers(c, "layer", "pathway") for c in self.curvatures if c.layer == hull.layer}
            conditions = {
                c.sublayer: _numbers(c, "layer", "sublayer") for c in self.conditionings if c.layer == hull.layer
            }
            layers.append(
                {
                    "layer": hull.layer,
                    "bound": dataclasses.asdict(hull.bound),
                    "bent": hull.bent,
                    "qkv": _summary(hull.qkv),
                    "input": _summary(hull.input),
                    **{name: _summary(spectrum) for name, spectrum in hull.pathways.items()},
                    "f": {name: _summary(spectrum) for name, spectrum in hull.f.items()},
                    "curvature": bends,
                    "condition": conditions,
                }
            )
        return {"step": self.step, "tokens": self.tokens, "tolerance": TOLERANCE, "layers": layers}


def _run(folder: Path, tokens: int, data: Path | None, place: str, console: Console, every: bool) -> list[Checkpoint]:
    from qurve.model.gpt import GPT

    run = RunFolder(folder)
    run.config_json(), run.latest_checkpoint()  # refuses what is no run, and one without a checkpoint
    steps = run.checkpoint_steps()
    models = [(step, partial(GPT.from_run, folder, step)) for step in (steps if every else steps[-1:])]
    if every:
        models.insert(0, (0, partial(untrained, run)))
    found = []
    text = _text(run, tokens, data)
    for step, model_of in models:
        try:
            model = finite(model_of(), folder).to(place)
        except BadInput as refusal:
            if step:
                raise
            plain(console)(f"no step 0: {refusal}")
            continue
        measured = _measured(model, step, text, f"step {step:,}")
        found.append(dataclasses.replace(measured, conditionings=_conditioned(model, text.first[0], console)))
    return found


def _measured(model: GPT, step: int, text: _Text, what: str) -> Checkpoint:
    """All but the condition numbers."""
    from qurve.analysis.curvature import measure_curvature
    from qurve.analysis.hull import measure_hulls

    config, place = model.config, model.token_embedding.weight.device
    few = text.first[: max(1, CURVATURE_TOKENS // config.context)].to(place)
    with progress_bar(what, len(text.parts) + 1) as done:

        def told() -> Iterator[torch.Tensor]:
            for count, ids_BT in enumerate(text, 1):
                yield ids_BT.to(place)
                done(count)

        hulls = measure_hulls(model, told())
        curvatures = measure_curvature(model, [few])
    return Checkpoint(step, text.tokens, hulls, curvatures, [])


def _conditioned(model: GPT, ids_T: torch.Tensor, console: Console) -> list[Conditioning]:
    from qurve.analysis.conditioning import condition_numbers, sequence_length

    length = sequence_length(model.config.d_model, model.config.context)
    try:
        return condition_numbers(model, ids_T[:length].to(model.token_embedding.weight.device))
    except BadInput as refusal:
        plain(console)(f"no condition numbers: {refusal}")
        return []


@dataclass(frozen=True)
class _Text:
    """Evenly spread windows of validation data, of which no more than one pass's are in memory."""

    split: TokenSplit
    context: int
    parts: list[np.ndarray[Any, Any]]
    """Of each pass, where its windows begin."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Ids `[B, T]`, pass by pass."""
        return map(self._read, self.parts)

    def _read(self, starts: np.ndarray[Any, Any]) -> torch.Tensor:
        import torch

        return torch.from_numpy(self.split.windows(starts, self.context)[0])

    @property
    def first(self) -> torch.Tensor:
        return self._read(self.parts[0])

    @property
    def tokens(self) -> int:
        return self.context * sum(map(len, self.parts))


def _text(run: RunFolder, tokens: int, data: Path | None) -> _Text:
    """So many tokens of the run's validation data, or all there are."""
    import numpy as np

    from qurve.config import from_dict
    from qurve.data.order import fixed_eval_windows
    from qurve.generate.text import run_data
    from qurve.model.config import ModelConfig

    context = from_dict(ModelConfig, run.config_json()[0].get("model"), "model").context
    split = run_data(run.path, data).split("val")
    starts = fixed_eval_windows(len(split), context=context, count=math.ceil(tokens / context))
    return _Text(split, context, np.array_split(starts, math.ceil(len(starts) * context / PASS_TOKENS)))


def _numbers(found: Any, *without: str) -> dict[str, Any]:
    """The fields as JSON: what is infinite is null."""
    fields = {name: value for name, value in dataclasses.asdict(found).items() if name not in without}
    return {name: None if value == math.inf else value for name, value in fields.items()}


def _summary(spectrum: Spectrum) -> dict[str, Any]:
    return {
        "rank": spectrum.rank(),
        "participation_ratio": spectrum.participation_ratio,
        "stable_rank": spectrum.stable_rank,
        "variance": spectrum.variance,
        "deviations": [float(f"{deviation:.6g}") for deviation in spectrum.deviations],
    }


# -------------------------------------------------------------------------------------------------------------- a study


def _study(folder: Path, tokens: int, data: Path | None, place: str) -> dict[str, Any]:
    """The queries' figures, mean over the blocks, of every finished run; and how each goes with the arms' gains."""
    from qurve.model.gpt import GPT
    from qurve.study.geometry import association
    from qurve.study.provenance import folder_of
    from qurve.study.results import load

    results = load(folder)
    figures: dict[str, dict[str, dict[int, float]]] = {}
    for arm in (results.baseline, *results.primary):
        for run in arm.finished:
            source = RunFolder(folder_of(results, run))
            model = finite(GPT.from_run(source.path), source.path).to(place)
            found = _measured(model, run.step, _text(source, tokens, data), f"{arm.name}, seed {run.seed}")
            for name, figure in _figures(found).items():
                figures.setdefault(name, {}).setdefault(arm.name, {})[run.seed] = figure
    if not figures:
        raise BadInput(f"{folder} has no finished run yet")
    tree: dict[str, Any] = {"study": str(folder), "figures": figures, "associations": {}}
    for name, by_arm in figures.items():
        try:
            tree["associations"][name] = dataclasses.asdict(association(results, by_arm))
        except BadInput as refusal:
            tree["associations"][name] = {"why_none": str(refusal)}
    return tree


def _figures(found: Checkpoint) -> dict[str, float]:
    queries = [c for c in found.curvatures if c.pathway == "query"]
    columns = {
        "bent": [hull.bent for hull in found.hulls],
        "participation_ratio": [hull.qkv.participation_ratio for hull in found.hulls],
        "participation_ratio_of_f": [hull.f["query"].participation_ratio for hull in found.hulls if "query" in hull.f],
        "second_difference": [c.neighbours for c in queries],
        "jacobian_spread": [c.jacobian_spread for c in queries],
    }
    means = {name: statistics.fmean(column) for name, column in columns.items() if column}
    return {name: mean if mean > ROUNDING else 0.0 for name, mean in means.items()}


def _study_tables(tree: dict[str, Any]) -> list[Table]:
    """Every arm's figures with its gain, and how each figure goes with the gains."""
    from qurve.study.page.gains import AXES, associations_of
    from qurve.study.worth import Table

    figures, associations = tree["figures"], associations_of(tree)
    gains = {point["arm"]: f"{point['gain']:+.2f}" for one in associations.values() for point in one["points"]}
    arms = dict.fromkeys(arm for by_arm in figures.values() for arm in by_arm)
    of_arms = []
    for arm in arms:
        runs = [by_arm.get(arm, {}).values() for by_arm in figures.values()]
        of_arms.append(
            [arm, *(f"{statistics.fmean(found):.4g}" if found else "" for found in runs), gains.get(arm, "")]
        )
    rows = [
        [AXES[name], *(f(associations[name]) if name in associations else "–" for f in ASSOCIATED.values())]
        for name in figures
    ]
    why_none = [f"{AXES[name]}: {one['why_none']}" for name, one in tree["associations"].items() if "why_none" in one]
    return [
        Table(
            title="Geometry of the arms",
            head=["arm", *(SHORT.get(name, AXES[name]) for name in figures), "gain %"],
            rows=of_arms,
            notes=[
                "Means over the seeds. Bent: share of the variance outside every flat that a linear pathway could "
                "have. PR: participation ratio. Gain: of the final loss over the baseline's, where there is a verdict."
            ],
        ),
        Table(
            title="Does it go with the gain?",
            head=["figure", *ASSOCIATED],
            rows=rows,
            notes=[
                "Pearson's correlation over the arms beside the baseline, and the share p of all orders of their gains "
                "that go as well with the figure: of n arms at least 1/n!, at least 1/n where all but one are alike.",
                *why_none,
            ],
        ),
    ]


# --------------------------------------------------------------------------------------------------------------- tables


def _tables(found: Sequence[Checkpoint]) -> list[Table]:
    newest = found[-1]
    tables = [_hull_table(newest), _curvature_table(newest)]
    if newest.conditionings:
        tables.append(_condition_table(newest))
    return [*tables, _training_table(found)] if len(found) > 1 else tables


def _hull_table(found: Checkpoint) -> Table:
    from qurve.analysis.spectrum import TOLERANCE
    from qurve.study.worth import Table

    rows = []
    for hull in found.hulls:
        bound, query = hull.bound, hull.pathways.get("query")
        f = hull.f.get("query")
        ranks = (f and f.rank(), query and query.rank())
        rows.append(
            [
                str(hull.layer),
                *(f"{dimension:,}" for dimension in (bound.flat, bound.tight, bound.paper, hull.qkv.rank())),
                f"{hull.qkv.participation_ratio:.1f}",
                f"{hull.qkv.stable_rank:.1f}",
                f"{100 * hull.bent:.3g}",
                *("" if rank is None else f"{rank:,}" for rank in ranks),
                "" if f is None else f"{f.participation_ratio:.1f}",
            ]
        )
    return Table(
        title="Affine hull",
        head=["block", "linear", "bound", "paper's", "rank", "PR", "stable", "bent %", "f", "query", "PR of f"],
        rows=rows,
        notes=[
            f"Step {found.step:,}, {found.tokens:,} tokens. Dimensions of (q, k, v) together. Rank: directions with "
            f"more than {TOLERANCE:g} of the largest deviation. PR: participation ratio. Bent: share of the variance "
            "outside every flat that a linear pathway could have. f, query: ranks of f alone and with its anchor."
        ],
    )


def _curvature_table(found: Checkpoint) -> Table:
    from qurve.study.worth import Table

    bent = [c for c in found.curvatures if c.jacobian_spread > ROUNDING]
    rows = []
    for c in bent:
        figures = (f"{x:.3g}" for x in (c.neighbours, c.distant, c.jacobian_spread))
        rows.append([f"{c.layer} {c.pathway}", *figures, "" if c.rank_f is None else str(c.rank_f), str(c.rank)])
    return Table(
        title="Curvature",
        head=["block", "neighbours", "distant", "Jacobian spread", "rank of f'", "of all"],
        rows=rows,
        notes=[
            "Second differences between neighbouring and between distant tokens, relative to the way between them; how "
            "much the Jacobian differs from token to token; and the ranks at a token of the Jacobians of f and of the "
            "projection. "
            + (
                "Pathways that are linear here, with no curvature, are left out."
                if bent
                else "Every pathway is linear."
            )
        ],
    )


def _condition_table(found: Checkpoint) -> Table:
    from qurve.study.worth import Table

    rows = [
        [
            f"{c.layer} {c.sublayer}",
            *("∞" if x == math.inf else f"{x:.4g}" for x in (c.without, c.with_skip, c.in_stream)),
        ]
        for c in found.conditionings
    ]
    return Table(
        title="Condition numbers",
        head=["block", "alone", "plus identity", "in the stream"],
        rows=rows,
        notes=[
            f"Of Jacobians on a sequence of {found.conditionings[0].tokens} tokens: of the sublayer on its normalised "
            "input, of the same with the identity added, and of what the network does to its stream."
        ],
    )


def _training_table(found: Sequence[Checkpoint]) -> Table:
    from qurve.study.worth import Table

    rows, of_queries = [], ("participation_ratio_of_f", "second_difference", "jacobian_spread")
    for checkpoint in found:
        ranks = "/".join(str(hull.qkv.rank()) for hull in checkpoint.hulls)
        figures = _figures(checkpoint)
        rows.append(
            [
                f"{checkpoint.step:,}",
                ranks,
                f"{figures['participation_ratio']:.1f}",
                f"{100 * figures['bent']:.3g}",
                *(f"{figures[name]:.3g}" if name in figures else "" for name in of_queries),
            ]
        )
    return Table(
        title="Over training",
        head=["step", "ranks", "PR", "bent %", "PR of f", "2nd difference", "Jacobian spread"],
        rows=rows,
        notes=["Ranks of every block; the other figures are means over the blocks, the last three of the queries."],
    )
