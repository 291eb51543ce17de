"""What a study is: arms, seeds, a baseline. Three come built in; a Python file that exposes `STUDY` is one as well."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pickle
import runpy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from qurve import accounting, plugins, presets
from qurve.config import LARGEST, apply_settings, content_hash, differences, to_dict
from qurve.errors import BadInput, QurveError, did_you_mean
from qurve.presets import zoo
from qurve.study.looks import NOTHING_SEEN, Seen
from qurve.study.power import LEAST_SEEDS
from qurve.study.same_run import seeded
from qurve.study.search import MOST_POINTS, Search, configured, point_name, short_names
from qurve.study.searched import evidence, read_evidence
from qurve.study.study_json import FORMAT, check_arm_name, check_matched, check_plain, check_study
from qurve.train.config import RunConfig

if TYPE_CHECKING:
    from qurve.train.step_time import TimeMatch


@dataclass(frozen=True)
class Arm:
    """One architecture with its hyperparameters. Raises `BadInput` for a name that cannot be a folder's."""

    name: str
    """Of the arm's folders, in a table's rows and in `--json`."""
    label: str
    """What the report calls it."""
    config: RunConfig
    """All that its runs share; the study gives each of them its seed."""
    paper: dict[str, str] | None = None
    """Figures that the paper prints for it, shown beside ours: `presets.PRINTED` has the keys."""
    match: accounting.Match | TimeMatch | None = None
    """How near a control that was solved for comes to what it is matched with; the report shows it."""
    matched: str | None = None
    """The arm whose architecture this is, trained at the baseline's best point instead of its own."""
    seed_offset: int = 0
    """Not 0 for an A/A arm: the baseline once more, on the same batches, with other weights. Added to `train.seed`."""

    def __post_init__(self) -> None:
        check_arm_name(self.name)
        if self.seed_offset < 0:
            raise BadInput(f"arm {self.name}: seed_offset = {self.seed_offset}: a seed is at least 0, so add to it")


MOST_LETTERS = 120
"""Of the name of an arm of its own: a search's runs have a point's name beside it, in one folder's."""

SHARED = (
    "data.",
    "eval.",
    "train.device",
    "train.threads",
    "train.steps",
    "train.stop_at",
    "train.tokens_per_step",
    "train.loss_bound",
    "model.context",
    "model.attends",
    "train.objective",
)
"""What every arm of a study must have alike: else a difference is not one of the arms."""


@dataclass(frozen=True)
class Study:
    """A set of runs that answers one question: every arm with every seed, on the same batches for the same seed.

    Raises `BadInput` where the comparison would not be fair or could not be judged: arms that differ in what all must
    have alike (`SHARED`), names or seeds that are there twice, a baseline that is no arm, looks that no number of seeds
    meets, a search over seeds that the comparison uses.
    """

    name: str
    """What the command line and files call it."""
    title: str
    """The question, at the report's top."""
    arms: tuple[Arm, ...]
    """What is compared; their order is the table's."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Every arm is trained with each; three is the least that a verdict takes."""
    baseline: str = "baseline"
    """Name of the arm that the others are compared with."""
    search: Search | dict[str, Any] | None = None
    """The search that is to be made before the arms are trained, or the evidence of one that their settings come from
    (`qurve.study.searched`)."""
    looks: tuple[int, ...] = ()
    """Ascending numbers of seeds at which the result may be looked at, the last one the planned number. Each may spend
    an equal part of the 5 % (`qurve.study.statistics`). Empty: there is one look, whatever the number."""

    def __post_init__(self) -> None:
        self._check_types()
        names = [arm.name for arm in self.arms]
        if len({name.casefold() for name in names}) < len(names) or not names:  # some disks tell no capitals apart
            raise BadInput(f"study {self.name}: arms need names of their own, not {', '.join(names) or 'none at all'}")
        if long := [arm.name for arm in self.arms if len(arm.name) > MOST_LETTERS and arm.matched is None]:
            raise BadInput(f"study {self.name}: an arm's name has at most {MOST_LETTERS} letters, not {len(long[0])}")
        if self.baseline not in names:
            raise BadInput(
                f"study {self.name}: its baseline {self.baseline!r} is no arm{did_you_mean(self.baseline, names)}"
            )
        first = self.arms[0].config
        for arm in self.arms:
            for path, (others, mine) in differences(first, arm.config).items():
                if path.startswith(SHARED):
                    path = path.removesuffix(".kind")
                    raise BadInput(
                        f"study {self.name}: every arm needs the same {path}, and {arm.name} has {mine!r} "
                        f"where {self.arms[0].name} has {others!r}; --set {path}=… changes all of them"
                    )
        if "val" not in first.eval.splits:
            raise BadInput(f"study {self.name}: arms are compared on val, which is not in eval.splits")
        if len(set(self.seeds)) < len(self.seeds) or not self.seeds:
            raise BadInput(f"study {self.name}: seeds must be different and at least one, not {list(self.seeds)}")
        self._check_looks()
        self._check_a_a()
        if isinstance(self.search, Search):
            self._check_search(self.search)
        elif self.search is not None:
            try:
                found = read_evidence(self.search)
            except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
                what = f"{type(error).__name__}: {error}"
                raise BadInput(
                    f"study {self.name}: search is neither a Search nor the evidence of one ({what})"
                ) from None
            self._check_search_seeds({*found.seeds, *(score.trial.seed for score in found.scores)})
        self._check_matched()
        self._check_different()

    def _check_different(self) -> None:
        """No two arms may make the same runs: what a search tries of them counts, not what it sets."""
        point = self.search.first_point if isinstance(self.search, Search) else ()
        alike: dict[Any, list[tuple[Arm, RunConfig]]] = {}  # a hash takes long, and most arms differ in these
        for arm in self.arms:
            if not self.is_out(arm):
                tried = dataclasses.replace(arm, config=configured(arm.config, point)) if point else arm
                config = self.run_config(tried, self.seeds[0])
                key = (config.model, config.train.lr, config.train.weight_decay)
                alike.setdefault(key, []).append((arm, config))
        for arms in alike.values():
            found: dict[str, Arm] = {}
            for arm, config in arms if len(arms) > 1 else ():
                if (same := found.setdefault(content_hash(config), arm)) is not arm:
                    searched = " but for what is searched" if point else ""
                    raise BadInput(
                        f"study {self.name}: {same.name} and {arm.name} are the same configuration{searched}, so they "
                        "would be the same runs; leave one out, or make it an A/A arm (seed_offset=1000), which shows "
                        "the noise"
                    )

    def _check_types(self) -> None:
        """What a Python file may get wrong, so that no later comparison stumbles over it."""
        check_arm_name(self.name, "a study's")
        for name, least in (("seeds", 0), ("looks", 1)):
            values = getattr(self, name)
            is_list = isinstance(values, list | tuple)
            if not is_list or any(type(value) is not int or not least <= value <= LARGEST for value in values):
                raise BadInput(f"study {self.name}: {name} are whole numbers from {least}, not {values!r:.80}")
        if not isinstance(self.title, str) or not all(isinstance(arm, Arm) for arm in self.arms):
            raise BadInput(f"study {self.name}: its title is a text, and each of its arms an Arm")

    def _check_looks(self) -> None:
        if not self.looks:
            return
        looks = ", ".join(map(str, self.looks))
        if list(self.looks) != sorted(set(self.looks)) or self.looks[0] < LEAST_SEEDS:
            raise BadInput(
                f"study {self.name}: looks are ascending numbers of seeds, each at least {LEAST_SEEDS}, not {looks}"
            )
        if len(self.seeds) >= LEAST_SEEDS and len(self.seeds) not in self.looks:
            raise BadInput(
                f"study {self.name}: looks are declared at {looks} seeds, so there would be no verdict with "
                f"{len(self.seeds)}; give it one of these numbers of seeds"
            )

    def _check_a_a(self) -> None:
        baseline = next(arm for arm in self.arms if arm.name == self.baseline)
        for arm in self.arms:
            if not arm.seed_offset:
                continue
            if arm is baseline or arm.config != baseline.config:
                raise BadInput(
                    f"study {self.name}: {arm.name} has a seed_offset, so it is an A/A arm: give it the configuration "
                    f"of the baseline, {self.baseline}, and leave that one without"
                )
            if both := {seed + arm.seed_offset for seed in self.seeds} & set(self.seeds):
                raise BadInput(
                    f"study {self.name}: with its seed_offset {arm.name} has weights of seed {min(both)}, which is "
                    "one of the study's; take a larger one, 1000 say"
                )

    def _check_matched(self) -> None:
        if any(arm.matched is not None for arm in self.arms):
            arms = [{"name": arm.name, "config": to_dict(arm.config), "matched": arm.matched} for arm in self.arms]
            try:
                check_matched(arms, self.baseline, self.search)
            except BadInput as error:
                raise BadInput(f"study {self.name}: {error}") from None

    def _check_search_seeds(self, seeds: set[int]) -> None:
        if both := seeds & {seed + arm.seed_offset for seed in self.seeds for arm in self.arms}:
            raise BadInput(
                f"study {self.name}: seed {min(both)} is one of the search and of the comparison; what is chosen with "
                "a seed looks better with it than it is, so give the search others"
            )

    def _check_search(self, search: Search) -> None:
        self._check_search_seeds(set(search.seeds))
        for path in search.paths:
            if path.startswith((*SHARED, "train.seed")):
                raise BadInput(f"study {self.name}: {path} cannot be searched, every arm of a study needs the same")
        try:
            for arm in self.arms:
                configured(arm.config, search.first_point)
        except BadInput as error:
            raise BadInput(f"study {self.name}, arm {arm.name}: {error}") from None

    @property
    def configs(self) -> dict[str, RunConfig]:
        """The configurations by name of the arms that a search tries: an A/A arm takes what the baseline gets."""
        return {arm.name: arm.config for arm in self.arms if not arm.seed_offset}

    def settled(self, found: dict[str, Any]) -> Study:
        """The study after its search, whose evidence this is: each arm at its best point, and each but the baseline at
        the baseline's best as well (`ARM@BASELINE`), unless that is the same point.

        An arm without a best point stays as it is, and `is_out`.
        """
        chosen = {name: item["point"] for name, item in found["chosen"].items()}
        chosen |= {arm.name: chosen[self.baseline] for arm in self.arms if arm.seed_offset}
        common, label = chosen[self.baseline], self.arms[[a.name for a in self.arms].index(self.baseline)].label
        own = [
            arm
            if (point := chosen[arm.name]) is None
            else dataclasses.replace(arm, config=configured(arm.config, tuple(point.items())))
            for arm in self.arms
        ]
        matched = [
            Arm(
                f"{arm.name}@{self.baseline}",
                f"{arm.label}, settings of {label}",
                configured(arm.config, tuple(common.items())),
                match=arm.match,
                matched=arm.name,
            )
            for arm in self.arms
            if common is not None and chosen[arm.name] != common
        ]
        return dataclasses.replace(self, arms=(*own, *matched), search=found)

    def is_out(self, arm: Arm) -> bool:
        """Whether the arm's search is over and found no point at which it trains: there is nothing to run."""
        name = self.baseline if arm.seed_offset else arm.name
        return isinstance(self.search, dict) and self.search.get("chosen", {}).get(name, {"point": ()})["point"] is None

    def change(self, settings: Sequence[str] = (), **train: Any) -> Study:
        """The same settings applied to every arm: `path=value` as in `--set`, or fields of `train` by name.

        Raises `BadInput` for what a configuration does not have or cannot be, and for what the study searches.
        """
        searched = self.search.paths if isinstance(self.search, Search) else ()
        for path in [setting.partition("=")[0].strip() for setting in settings] + [f"train.{name}" for name in train]:
            if path in searched:
                raise BadInput(f"--set {path}: study {self.name} searches it, so a value would change nothing")

        def changed(arm: Arm) -> Arm:
            config = dataclasses.replace(arm.config, train=dataclasses.replace(arm.config.train, **train))
            config = apply_settings(config, settings)
            match = arm.match if config.model == arm.config.model else None  # it was solved for that model
            return dataclasses.replace(arm, config=config, match=match)

        return dataclasses.replace(self, arms=tuple(changed(arm) for arm in self.arms))

    def run_config(self, arm: Arm, seed: int) -> RunConfig:
        """The arm with this seed."""
        return seeded(arm.config, seed, arm.seed_offset)

    def to_json(self, command: str, seen: Seen = NOTHING_SEEN) -> str:
        """`study.json`: what the report needs to know beyond the runs. `BadInput` for one that no report could read."""
        arms = []
        for arm in self.arms:
            cost = accounting.count(arm.config.model)
            arms.append(
                {
                    "name": arm.name,
                    "label": arm.label,
                    "config": to_dict(arm.config),
                    "non_embedding": cost.non_embedding,
                    "total": cost.total,
                    "flops_per_token": cost.flops_per_token,
                    "paper": arm.paper,
                    "match": None if arm.match is None else str(arm.match),
                    "matched": arm.matched,
                    "seed_offset": arm.seed_offset,
                }
            )
        tree = {
            "format": FORMAT,
            "name": self.name,
            "title": self.title,
            "baseline": self.baseline,
            "seeds": list(self.seeds),
            "looks": list(self.looks),
            **seen.to_json(),
            "command": command,
            "arms": arms,
            "search": evidence(self.search, self.configs, ()) if isinstance(self.search, Search) else self.search,
        }
        text = json.dumps(tree, indent=2) + "\n"
        check_plain(tree)
        check_study(json.loads(text))
        return text


Kind = TypeVar("Kind")


def load_study(name: str) -> Study:
    """A built-in study by name, or the `STUDY` of a Python file by path. Raises `BadInput` for anything else."""
    return defined(name, Study, BUILT_IN)


def defined(name: str, kind: type[Kind], built_in: Mapping[str, Callable[[], Kind]]) -> Kind:
    """One of the built-in ones by name, or what a Python file exposes: a `Study` as `STUDY`, for instance.

    Raises `BadInput` for anything else, and for what worker processes could not be given.
    """
    what = kind.__name__
    if name in built_in:
        return built_in[name]()
    if not name.endswith(".py"):
        raise BadInput(
            f"there is no {what.lower()} {name!r}{did_you_mean(name, built_in)} (or give a Python file, *.py, exposing "
            f"{what.upper()})"
        )
    if not Path(name).is_file():
        raise BadInput(f"there is no file {name}")
    plugins.make_importable(Path(name).parent)
    try:
        found = runpy.run_path(name).get(what.upper())
    except QurveError:
        raise
    except SystemExit as error:
        raise BadInput(f"{name} cannot be run: it ends the process (sys.exit({error.code!r}))") from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # anything can go wrong in a file that somebody wrote
        raise BadInput(f"{name} cannot be run: {type(error).__name__}: {error}") from error
    if not isinstance(found, kind):
        raise BadInput(f"{name} does not expose a qurve {what} as {what.upper()}")
    try:
        pickle.dumps(found)
    except Exception as error:
        raise BadInput(
            f"{name} cannot be given to worker processes ({error}); define a kind of your own in a file beside the "
            f"{what.lower()}, and import it from there"
        ) from None
    return found


def grid_study(preset: str, grid: Sequence[str], settings: Sequence[str] = ()) -> Study:
    """A study of a preset with every point of a grid as an arm, the first as the baseline.

    `grid` has one `path=value,value,…` an axis; `settings` change the preset before it. Raises `BadInput` for an axis
    in which arms may not differ, and for points that are alike.
    """
    if preset not in presets.names():
        raise BadInput(f"--grid varies a preset, and {preset!r} is none{did_you_mean(preset, presets.names())}")
    base = apply_settings(presets.get(preset), settings)
    axes = dict(_axis(text) for text in grid)
    if len(axes) < len(grid):
        raise BadInput("--grid: a path is given twice; write all of its values into one, separated by commas")
    if (size := math.prod(map(len, axes.values()))) > MOST_POINTS:
        raise BadInput(f"--grid: {size:,} points, and at most {MOST_POINTS:,} are taken")
    names = short_names(list(axes))
    arms: dict[str, Arm] = {}
    for values in itertools.product(*axes.values()):
        label = ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
        try:
            config = apply_settings(base, [f"{path}={value}" for path, value in zip(axes, values, strict=True)])
        except BadInput as error:
            raise BadInput(str(error).replace("--set", "--grid", 1)) from None
        key = content_hash(config)
        if key in arms:
            raise BadInput(f"--grid: the points {arms[key].label} and {label} are the same configuration")
        name = point_name(dict(zip(axes, values, strict=True)))
        taken = {arm.name for arm in arms.values()}
        arms[key] = Arm(name if name not in taken else f"{name}-{len(arms) + 1}", label, config)
    first = next(iter(arms.values()))
    study = "-".join([preset.replace("/", "-"), *names])
    return Study(study, f"{preset}: {'; '.join(grid)}", tuple(arms.values()), baseline=first.name)


def _axis(text: str) -> tuple[str, list[str]]:
    """The path and the values of `path=value,value`. Commas inside of brackets or quotes belong to a value."""
    path, _, listed = text.partition("=")
    path, depth, quoted, values = path.strip(), 0, False, [""]
    for char in listed:
        quoted ^= char == '"'
        depth += 0 if quoted else (char in "[{") - (char in "]}")
        if char == "," and not depth and not quoted:
            values.append("")
        else:
            values[-1] += char
    values = [value.strip() for value in values]
    if not path or not all(values):
        raise BadInput(f"--grid {text!r}: write it as path=value,value, for example train.lr=1e-3,2e-3")
    if path == "train.seed":
        raise BadInput("--grid train.seed: every arm is trained with every seed; --seeds N says with how many")
    if path.startswith(SHARED):
        raise BadInput(f"--grid {path}: every arm of a study needs the same; --set {path}=… sets it for all of them")
    return path, values


LABELS = {
    "baseline": "Baseline",
    "mlp-4.75": "MLP 4.75",
    "mlp-4.75-scaled": "MLP 4.75 (scaled rate)",
    "res-gelu": "Res. GELU",
    "res-gelu-wd005": "Res. GELU (decay 0.05)",
    "res-gelu-4e-3": "Res. GELU (rate 4e-3)",
    "res-gelu-best": "Res. GELU (best)",
}

NEAREST_ROW = {"baseline": "paper/baseline", "mlp-4.75": "paper/mlp-4.75", "res-gelu": "paper/res-gelu-best"}
"""The row of the paper's table that shows a small arm's architecture."""


def _small() -> Study:
    arms = tuple(_built_in(f"small/{name}", presets.PRINTED[row]) for name, row in NEAREST_ROW.items())
    title = "The paper's three architectures at about a million parameters"
    return Study("small", title, arms, search=presets.small_search())


def _paper() -> Study:
    arms = tuple(_built_in(name, printed) for name, printed in presets.PRINTED.items())
    return Study("paper", "Table 1 of the paper, at its scale, with three seeds", arms)


def _zoo() -> Study:
    baseline = presets.get("zoo/baseline").model
    arms = tuple(
        Arm(member.name, member.label, presets.get(f"zoo/{member.name}"), match=member.match)
        for member in zoo.arms(baseline)
    )
    title = "One small run of each kind, at the baseline's rate: what everything costs, and no ranking"
    return Study("zoo", title, arms, seeds=(1,))


def _built_in(preset: str, printed: dict[str, str]) -> Arm:
    """The arm of a preset; the paper's control has an eighth more parameters than the baseline."""
    family, name = preset.split("/")
    config, baseline = presets.get(preset), presets.get(f"{family}/baseline").model
    control = accounting.mlp_widened(baseline, match="params", by=0.125)
    return Arm(name, LABELS[name], config, printed, control.match if control.config == config.model else None)


BUILT_IN: dict[str, Callable[[], Study]] = {"small": _small, "paper": _paper, "zoo": _zoo}
