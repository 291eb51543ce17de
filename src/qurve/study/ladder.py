"""The ladder: the same arms at several sizes, and at several lengths of training. Does a gain grow or shrink?

    ladder.json               what was measured, small enough to keep; `load_ladder` reads it alone
    definition/               the file that it comes from, as a study keeps its own (`qurve.study.source`)
    rungs/<rung>/             one study each: a size with a length, every arm with every seed

Each rung trains full schedules of `tokens_per_parameter` times the baseline's non-embedding parameters, so that no
unfinished schedule is ever compared. A rung is made, continued and reported like any other study.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qurve import accounting, presets
from qurve.data.loader import TokenData
from qurve.errors import BadInput, did_you_mean
from qurve.files import check_folders, write_atomic
from qurve.study.definition import LABELS, Arm, Study, defined
from qurve.study.execute import Say, run_study
from qurve.study.jobs import resolved
from qurve.study.ladder_results import FILE, LadderResults, load_ladder, measured, to_json
from qurve.study.pool import check_pool
from qurve.study.source import FOLDER as DEFINITION
from qurve.study.source import keep, kept
from qurve.study.study_json import read_study
from qurve.train.config import RunConfig

TOKENS_PER_PARAMETER = 20.0
"""About what Hoffmann et al. (arXiv 2203.15556) found to be the best use of compute."""
LENGTHS = (60.0, 240.0)
"""A gain that is left after these is a hard one: it is no head start that more training makes up for."""

MADE_BY_RUNGS = (
    *(f"model.{name}" for name in ("n_layers", "d_model", "n_heads", "d_ff")),
    *(f"train.{name}" for name in ("steps", "stop_at", "horizon", "warmup_steps", "tokens_per_step", "seed")),
    "eval.every",
)
"""Settings that a rung's size and length decide."""

Variant = Callable[[RunConfig], RunConfig]
"""What an arm makes of a rung's configuration, which has the baseline's model at the rung's size."""


@dataclass(frozen=True)
class Rung:
    """One size with one length of training."""

    name: str
    n_layers: int
    d_model: int
    tokens_per_parameter: float
    study: Study


@dataclass(frozen=True)
class Ladder:
    """Studies of the same arms at several sizes and lengths. A Python file exposes one as `LADDER`."""

    name: str
    title: str
    rungs: tuple[Rung, ...]

    def __post_init__(self) -> None:
        names = [rung.name for rung in self.rungs]
        if not names or len(set(names)) < len(names):
            raise BadInput(f"ladder {self.name}: it needs rungs, each once, not {', '.join(names) or 'none at all'}")

    def change(self, settings: Sequence[str]) -> Ladder:
        """The same settings applied to every arm of every rung. Raises `BadInput` for those that make the rungs."""
        for path in (setting.partition("=")[0].strip() for setting in settings):
            if path in MADE_BY_RUNGS or path == "model":
                raise BadInput(f"--set {path}: the ladder {self.name} gives it to each rung; define another ladder")
        rungs = [dataclasses.replace(rung, study=rung.study.change(settings)) for rung in self.rungs]
        return dataclasses.replace(self, rungs=tuple(rungs))


def ladder(
    name: str,
    title: str,
    base: RunConfig,
    sizes: Sequence[tuple[int, int]],
    arms: Mapping[str, Variant],
    *,
    tokens_per_parameter: float = TOKENS_PER_PARAMETER,
    lengths: Sequence[float] = (),
    seeds: tuple[int, ...] = (1, 2, 3),
    baseline: str = "baseline",
    search: Any = None,
) -> Ladder:
    """One rung for each size, and for the first size one more for each of `lengths`.

    `sizes` are pairs (layers, width), heads 64 wide from a width of 256 on and 32 below; the feed-forward, the warm-up
    and the evaluations keep the proportions that `base` has. `arms` make their configuration from a rung's: model,
    rates, or both, by its size if they like. `lengths` are tokens per parameter, as `tokens_per_parameter` is, and
    `search` is what every rung's study is given as its own. Raises `BadInput` for what cannot be.
    """
    if baseline not in arms:
        raise BadInput(f"ladder {name}: its baseline {baseline!r} is no arm{did_you_mean(baseline, list(arms))}")
    points = [(size, tokens_per_parameter) for size in sizes] + [(size, long) for size in sizes[:1] for long in lengths]
    return Ladder(
        name, title, tuple(_rung(name, title, base, *point, arms, seeds, baseline, search) for point in points)
    )


def _rung(
    name: str,
    title: str,
    base: RunConfig,
    size: tuple[int, int],
    tokens_per_parameter: float,
    arms: Mapping[str, Variant],
    seeds: tuple[int, ...],
    baseline: str,
    search: Any,
) -> Rung:
    n_layers, d_model = size
    sized = at_size(base, n_layers, d_model)
    parameters = accounting.count(arms[baseline](sized).model).non_embedding
    rung = f"{n_layers}x{d_model}@{tokens_per_parameter:g}"
    try:
        config = at_length(sized, tokens_per_parameter * parameters)
    except BadInput as error:
        raise BadInput(f"ladder {name}, rung {rung}: {error}") from None
    study = Study(
        f"{name}-{rung}",
        f"{title}: {n_layers} layers {d_model} wide, {tokens_per_parameter:g} tokens per parameter",
        tuple(Arm(arm, LABELS.get(arm, arm), make(config)) for arm, make in arms.items()),
        seeds,
        baseline,
        search,
    )
    return Rung(rung, n_layers, d_model, tokens_per_parameter, study)


def at_size(config: RunConfig, n_layers: int, d_model: int) -> RunConfig:
    """The configuration with its model in another size. Raises `BadInput` for a width that heads of 32 do not fill."""
    head = 64 if d_model >= 256 and d_model % 64 == 0 else 32
    if d_model < 1 or d_model % head:
        raise BadInput(f"a ladder's widths are multiples of 32, its narrowest heads, and {d_model} is none")
    model = config.model
    d_ff = model.d_ff * d_model // model.d_model
    model = dataclasses.replace(model, n_layers=n_layers, d_model=d_model, n_heads=d_model // head, d_ff=d_ff)
    return dataclasses.replace(config, model=model)


def at_length(config: RunConfig, tokens: float) -> RunConfig:
    """The configuration with a full schedule of about so many tokens; warm-up and evaluations keep their shares."""
    train = config.train
    steps = round(tokens / train.tokens_per_step)
    if steps < 2:
        raise BadInput(
            f"{tokens:,.0f} tokens are {tokens / train.tokens_per_step:.2g} steps of {train.tokens_per_step:,}; "
            "lower train.tokens_per_step, or train longer"
        )
    share = steps / train.steps
    return dataclasses.replace(
        config,
        train=dataclasses.replace(
            train, steps=steps, stop_at=None, horizon=None, warmup_steps=round(share * train.warmup_steps)
        ),
        eval=dataclasses.replace(config.eval, every=max(1, round(share * config.eval.every))),
    )


# -------------------------------------------------------------------------------------------------------------- making


def run_ladder(
    wanted: Ladder,
    folder: Path,
    data: TokenData,
    *,
    command: str,
    definition: Path | None = None,
    say: Say = print,
    **options: Any,
) -> tuple[LadderResults, dict[str, str]]:
    """Make every rung below `folder`, or the rest of what was begun, and write `ladder.json` after each.

    The file that the ladder comes from, its `definition`, is kept in the folder. `options` are `run_study`'s (workers,
    cluster, retries, pool). Returns what was measured, and the name and reason of each run that failed. Raises
    `BadInput`, before anything is made, when the folder holds another ladder or some rung cannot be trained on this
    machine (on a cluster: when its turn comes).
    """
    refuse_foreign(folder, wanted)
    earlier = earlier_rungs(wanted, folder)
    if (pool := options.get("pool")) is not None:
        check_pool(pool)
    if options.get("cluster") is None:
        resolved([arm.config for rung in wanted.rungs for arm in rung.study.arms], 1, str(data.folder))
    if definition is not None:
        folder.mkdir(parents=True, exist_ok=True)
        keep(definition, folder)
    failed: dict[str, str] = {}
    for place, rung in enumerate(wanted.rungs, 1):
        say(f"rung {place} of {len(wanted.rungs)}: {rung.study.title}")
        broken = run_study(rung.study, rung_path(folder, rung.name), data, command=command, say=say, **options)
        failed |= {f"{rung.name}, {name}": why for name, why in broken.items()}
        write_atomic(folder / FILE, to_json(_results(wanted, folder, data, command, earlier)))
    return load_ladder(folder), failed


def rung_path(folder: Path, rung: str) -> Path:
    return folder / "rungs" / rung


def refuse_foreign(folder: Path, wanted: Ladder) -> None:
    """Raise `BadInput` for a folder that holds another ladder, or something else.

    A damaged `ladder.json` is no hindrance, it is written anew: whose it was, its rungs' studies say as well.
    """
    check_folders(folder, "data", "rungs", "report", DEFINITION)
    file = folder / FILE
    if file.is_dir():
        raise BadInput(f"{file} is a folder; remove it, or give another --out")
    try:
        there = load_ladder(folder).name if file.exists() else wanted.name
    except BadInput:
        studies = {rung.name: rung.study.name for rung in wanted.rungs}
        for rung in sorted(folder.glob("rungs/*/study.json")):
            if (name := read_study(rung)["name"]) != studies.get(rung.parent.name):
                raise BadInput(
                    f"{file} is damaged, and {rung.parent} holds the study {name!r}, no rung of the ladder "
                    f"{wanted.name!r}; give another --out"
                ) from None
    else:
        if there != wanted.name:
            raise BadInput(f"{folder} holds the ladder {there!r}; give another --out")
    found = {entry.name for entry in folder.iterdir()} if folder.exists() else set()
    if found - {"data", "rungs", "report", FILE, DEFINITION}:
        raise BadInput(f"{folder} holds something that is not a ladder; give another --out")


def earlier_rungs(wanted: Ladder, folder: Path) -> tuple[tuple[str, ...], ...]:
    """The sets of rungs that this ladder was run with before, by its `ladder.json` and the rungs that lie there."""
    found: tuple[tuple[str, ...], ...] = ()
    now = {rung.name for rung in wanted.rungs}
    try:
        before = load_ladder(folder) if (folder / FILE).is_file() else None
    except BadInput:  # it is written anew (`refuse_foreign`), and its rungs still lie there
        before = None
    if before is not None:
        seen = tuple(rung.name for rung in before.rungs if any(arm.losses for arm in rung.arms.values()))
        is_same = {*(rung.name for rung in before.rungs), *before.not_begun} == now
        found = before.earlier_rungs if is_same or not seen else (*before.earlier_rungs, seen)
    begun = tuple(sorted(file.parent.name for file in folder.glob("rungs/*/study.json")))
    return found if set(begun) <= now.union(*found) else (*found, begun)


def _results(
    wanted: Ladder, folder: Path, data: TokenData, command: str, earlier: tuple[tuple[str, ...], ...]
) -> LadderResults:
    """Every rung that was begun, as it stands, and the names of the others."""
    begun = [rung for rung in wanted.rungs if (rung_path(folder, rung.name) / "study.json").exists()]
    missing = dict.fromkeys(rung.name for rung in wanted.rungs)
    for rung in begun:
        del missing[rung.name]
    data_tokens = len(data.split("train"))
    rungs = tuple(
        measured(
            rung_path(folder, rung.name),
            rung.name,
            (rung.n_layers, rung.d_model),
            rung.tokens_per_parameter,
            data_tokens,
        )
        for rung in begun
    )
    baseline = wanted.rungs[0].study.baseline
    names = (wanted.name, wanted.title, command, baseline, data.fingerprint)
    return LadderResults(*names, rungs, tuple(missing), earlier, kept(folder))


# ------------------------------------------------------------------------------------------------------------ built in


def load_definition(name: str) -> Ladder:
    """A built-in ladder by name, or the `LADDER` of a Python file by path. Raises `BadInput` for anything else."""
    return defined(name, Ladder, BUILT_IN)


def like(preset: str, reference: str) -> Variant:
    """An arm at any size: what the preset changes in the reference's query, feed-forward's proportion, and rates."""
    arm, base = presets.get(preset), presets.get(reference)

    def make(config: RunConfig) -> RunConfig:
        model = dataclasses.replace(
            config.model, query=arm.model.query, d_ff=config.model.d_ff * arm.model.d_ff // base.model.d_ff
        )
        train = dataclasses.replace(
            config.train,
            lr=config.train.lr * arm.train.lr / base.train.lr,
            min_lr=config.train.min_lr * arm.train.min_lr / base.train.min_lr,
        )
        return dataclasses.replace(config, model=model, train=train)

    return make


def _small() -> Ladder:
    arms = {arm: like(f"small/{arm}", "small/baseline") for arm in presets.SMALL_MODELS}
    title = "The paper's three architectures up to 0.3 M parameters, at the rates that suit them at 0.8 M"
    sizes = ((2, 32), (2, 64), (3, 96))
    return ladder("small", title, presets.get("small/baseline"), sizes, arms, lengths=LENGTHS)


PAPER_SIZES = {
    768: "paper/baseline",
    1024: "scale/350m/baseline",
    1536: "scale/760m/baseline",
    2048: "scale/1.3b/baseline",
}


def _paper() -> Ladder:
    def tuned(variant: Variant) -> Variant:
        """At the peak rate of GPT-3's table for the size, or in the paper's proportion to it."""

        def make(config: RunConfig) -> RunConfig:
            rates = presets.get(PAPER_SIZES[config.model.d_model]).train
            train = dataclasses.replace(config.train, lr=rates.lr, min_lr=rates.min_lr)
            return variant(dataclasses.replace(config, train=train))

        return make

    rows = {"baseline": "paper/baseline", "mlp-4.75": "paper/mlp-4.75", "res-gelu": "paper/res-gelu-best"}
    arms = {arm: tuned(like(row, "paper/baseline")) for arm, row in rows.items()}
    sizes = [(presets.get(preset).model.n_layers, width) for width, preset in PAPER_SIZES.items()]
    title = "The paper's three architectures from 124 M to 1.3 B parameters, at rates that were searched at 124 M alone"
    return ladder("paper", title, presets.get("paper/baseline"), sizes, arms, lengths=LENGTHS)


BUILT_IN: dict[str, Callable[[], Ladder]] = {"small": _small, "paper": _paper}
