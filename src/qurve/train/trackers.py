"""Mirrors of `metrics.jsonl` for those who watch their runs elsewhere: TensorBoard, and Weights & Biases.

A mirror holds copies: nothing is ever read back from it, and training never fails, waits long or changes because of it.
What a training line holds appears under `train/`, with `train/tokens_per_s`; an evaluation as `val/loss`, `test/loss`
or, on the training split, `train/eval_loss`; of a mixture of experts, `val/largest_expert_share` is the share of the
choices that the most used expert of any block got. Dynamics are `dynamics/<measure>/<block>`. Steps are those of
`metrics.jsonl`.
"""

from __future__ import annotations

import contextlib
import secrets
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from qurve.config import to_dict
from qurve.runfolder import RunFolder, Status
from qurve.train.config import RunConfig

PATIENCE = 30.0
"""Seconds that a tracker's server may take to answer at the start, and to take the rest at the end."""


class Tracker(Protocol):
    """One mirror. Opened by calling the class; any method may raise anything."""

    def __init__(self, run: RunFolder, config: RunConfig, first_step: int) -> None: ...

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self, status: Status) -> None: ...


class Mirror:
    """The trackers of one run. A tracker that fails is named in one note and dropped, and training goes on.

    This is the one place where every `Exception` is caught: a tracker is other people's code with disks and servers of
    its own, whose ways to fail nobody can list, and none of them is worth a training.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._trackers: dict[str, Tracker] = {}

    @classmethod
    def open(
        cls,
        names: Sequence[str],
        run: RunFolder,
        config: RunConfig,
        first_step: int,
        note: Callable[[str], None],
    ) -> Mirror:
        """Open the trackers `names` for `run`, whose next line will be that of `first_step`.

        `first_step` is 0 in a new run (its evaluation before training), k + 1 after a resume from the checkpoint of
        step k: a mirror forgets what it was told of that step and later ones.
        """
        mirror = cls(note)
        for name in names:
            try:
                mirror._trackers[name] = TRACKERS[name](run, config, first_step)
            except Exception as error:
                mirror._failed(name, error)
        return mirror

    def log(self, line: Mapping[str, Any]) -> None:
        """Mirror one line of `metrics.jsonl`."""
        values = scalars(line)
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(line["step"], values)
            except Exception as error:
                del self._trackers[name]
                self._failed(name, error)
                with contextlib.suppress(Exception):  # said once already; this only gives its files back
                    tracker.close("failed")

    def close(self, status: Status) -> None:
        """At the end of a run, whatever it was. May be called again."""
        while self._trackers:
            name, tracker = self._trackers.popitem()
            try:
                tracker.close(status)
            except Exception as error:
                self._failed(name, error)

    def _failed(self, name: str, error: Exception) -> None:
        reason = textwrap.shorten(str(error), 300, placeholder=" …")
        if isinstance(error, ModuleNotFoundError):
            reason += "; it comes with pip install 'qurve[track]'"
        self._note(f"{name} no longer mirrors this run ({type(error).__name__}: {reason}); training goes on without it")


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """What a tracker is told of a metrics line: its numbers, by the names of their charts."""
    if "split" in line:  # the training split's must not fall among the losses of the steps
        values = {"train/eval_loss" if line["split"] == "train" else f"{line['split']}/loss": line["loss"]}
        if "expert_usage" in line:
            values[f"{line['split']}/largest_expert_share"] = max(map(max, filter(None, line["expert_usage"])))
        if logits := [logit for logit in line.get("max_logit", ()) if logit is not None]:
            values[f"{line['split']}/max_logit"] = max(logits)
        return values
    values = {f"train/{key}": value for key, value in line.items() if key != "step" and isinstance(value, (int, float))}
    if line["seconds"] > 0:
        values["train/tokens_per_s"] = line["tokens"] / line["seconds"]
    for measure, by_layer in line.get("dynamics", {}).items():
        values |= {f"dynamics/{measure}/{n}": value for n, value in enumerate(by_layer) if value is not None}
    return values


class TensorBoard:
    """Event files in `tensorboard/`, one for each process that continued the run."""

    def __init__(self, run: RunFolder, config: RunConfig, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run.path / "tensorboard"), purge_step=first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)
        # So that a kill loses nothing from before the checkpoint that the run continues from.
        self._writer.flush()

    def close(self, status: Status) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases in `wandb/`: offline or online as its own settings say (`WANDB_MODE` and others)."""

    def __init__(self, run: RunFolder, config: RunConfig, first_step: int) -> None:
        import wandb

        # Silent: its lines would run into the progress bar.
        settings = wandb.Settings(silent=True, console="off", init_timeout=PATIENCE, finish_timeout=PATIENCE)
        mode = wandb.setup(settings=settings).settings.mode
        if mode not in ("offline", "dryrun", "disabled") and not wandb.login(prompt=False, verify=False):
            # Asked here, since `init` would ask for a key at the terminal and wait for ever.
            raise PermissionError("no API key: run `wandb login` first, or set WANDB_MODE=offline")
        folder = run.path / "wandb"
        folder.mkdir(exist_ok=True)
        identity = folder / "id"  # kept in the folder: a moved run stays itself, a new one in its place is another
        if not identity.is_file():
            identity.write_text(secrets.token_hex(8), encoding="utf-8")
        self._run: Any = wandb.init(
            dir=str(run.path),
            id=identity.read_text(encoding="utf-8"),
            resume="allow",
            reinit="create_new",  # one process may hold several runs, one after the other or its caller's own
            project=None if wandb.setup().settings.project else "qurve",
            name="/".join(run.path.resolve().parts[-2:]),
            config=to_dict(config),
            allow_val_change=True,
            settings=settings,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, status: Status) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=int(status in ("diverged", "failed")))


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
