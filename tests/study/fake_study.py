"""Writes study folders of invented numbers, to test what reads them. No number here was ever measured."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

from qurve.config import content_hash, from_dict, to_dict, to_json
from qurve.runfolder import RunFolder
from qurve.study.study_json import updates_of
from qurve.train.config import RunConfig

STEPS = 400


def config(**changes: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "model": {
            "n_layers": 4,
            "d_model": 128,
            "n_heads": 4,
            "d_ff": 512,
            "context": 128,
            "vocab_size": 2048,
            "query": {"kind": "linear"},
        },
        "data": {"fingerprint": "f" * 64, "order": "epochs"},
        "train": {"lr": 2e-3, "min_lr": 2e-4, "weight_decay": 0.1, "steps": STEPS, "tokens_per_step": 2048, "seed": 1},
        "eval": {"every": 20},
    }
    for path, value in changes.items():
        *nodes, leaf = path.split("__")
        node = tree
        for name in nodes:
            node = node[name]
        node[leaf] = value
    return tree


def arm(name: str, label: str, gain: float = 0.0, *, non_embedding: int = 800_000, **more: Any) -> dict[str, Any]:
    """An arm of `write_study`; `gain` in nats is what it is better than the baseline at the end, before the noise."""
    tree = more.pop("config", None) or config()
    return {"name": name, "label": label, "gain": gain, "config": tree, "non_embedding": non_embedding, **more}


BASELINE = arm(
    "baseline",
    "Baseline",
    paper={"weight_decay": "0.10", "lr": "6e-4", "min_lr": "6e-5", "val_loss": "2.9441", "delta_params": "ref."},
)
WIDER = arm(
    "mlp-4.75",
    "MLP 4.75",
    0.004,
    non_embedding=900_000,
    config=config(model__d_ff=608, train__lr=4e-3, train__min_lr=4e-4),
)
NONLINEAR = arm(
    "res-gelu",
    "Res. GELU (nonlinear query)",
    0.05,
    non_embedding=800_512,
    config=config(
        model__query={"kind": "bottleneck", "width": 64, "scale": 0.5},
        train__lr=8e-3,
        train__min_lr=1.6e-4,
        train__seed=2,
    ),
    paper={
        "delta_params": "~0.03 %",
        "weight_decay": "0.10",
        "lr": "3.6e-3",
        "min_lr": "2e-5",
        "val_loss": "2.8736",
        "dll": "+2.40 %",
        "dppx": "+6.81 %",
    },
)
THREE_ARMS = (BASELINE, WIDER, NONLINEAR)


def grid(*architectures: tuple[str, str]) -> tuple[dict[str, Any], ...]:
    """Two rates by two decays of each architecture; the first point is the study's baseline."""
    arms = []
    for name, model in architectures:
        for lr in (2e-3, 8e-3):
            for decay in (0.1, 0.05):
                tree = config(train__lr=lr, train__weight_decay=decay, model__query={"kind": model})
                arms.append(
                    arm(f"{name}@{lr:g}-{decay:g}", f"{name.title()}, rate {lr:g}, decay {decay:g}", config=tree)
                )
    return tuple(arms)


def write_study(
    folder: Path,
    arms: tuple[dict[str, Any], ...] = THREE_ARMS,
    *,
    seeds: tuple[int, ...] = (1, 2, 3),
    title: str = "Is a nonlinear query worth it?",
    fates: dict[tuple[str, int], str] | None = None,
    search: bool = True,
    finals: dict[tuple[str, int], float] | None = None,
    steps: int | None = None,
    every: int = 20,
) -> Path:
    """A whole study, whose runs make as many updates as their arm's configuration says, or all of them `steps`.

    `fates[arm, seed]` makes a run `missing`, `running`, `failed`, `stopped` or `diverged`, or gives it batches of its
    own (`other-batches`); `finals[arm, seed]` sets the last validation loss; there is an evaluation `every` so many
    steps. An arm whose configuration evaluates the test split has its loss there a hundredth above, or at the end as
    its `test` says, seed by seed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if steps is not None:
        arms = tuple({**a, "config": {**a["config"], "train": {**a["config"]["train"], "steps": steps}}} for a in arms)
    described = [
        {
            "total": a["non_embedding"] + 278_528,
            "flops_per_token": 6.0 * a["non_embedding"],
            "paper": None,
            **{key: value for key, value in a.items() if key not in ("gain", "test")},
        }
        for a in arms
    ]
    study = {
        "format": 1,
        "name": "small",
        "title": title,
        "baseline": arms[0]["name"],
        "seeds": list(seeds),
        "command": "qurve compare small --seeds 3",
        "arms": described,
        "search": _search(arms) if search else None,
    }
    (folder / "study.json").write_text(json.dumps(study), encoding="utf-8")
    for a in arms:
        for seed in seeds:
            fate = (fates or {}).get((a["name"], seed), "finished")
            if fate != "missing":
                _write_run(folder / "runs" / a["name"] / f"seed-{seed}", a, seed, fate, finals or {}, every)
    return folder


def write_study_around(real: RunFolder, folder: Path, arms: tuple[dict[str, Any], ...], **options: Any) -> Path:
    """A study of invented numbers whose arms all have a real run's configuration, and its checkpoints in every run."""
    tree, _ = real.config_json()
    config = from_dict(RunConfig, {key: value for key, value in tree.items() if key != "format"})
    write_study(folder, tuple({**a, "config": to_dict(config)} for a in arms), **options)
    for path in (folder / "runs").glob("*/seed-*"):
        run, seed = RunFolder(path), int(path.name.removeprefix("seed-"))
        own = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))
        run.write_config(to_json(own), content_hash(own))
        shutil.rmtree(run.checkpoints)
        shutil.copytree(real.checkpoints, run.checkpoints)
    return folder


def _write_run(
    path: Path,
    a: dict[str, Any],
    seed: int,
    fate: str,
    finals: dict[tuple[str, int], float],
    every: int,
) -> None:
    steps = updates_of(a["config"]) or STEPS
    run = RunFolder(path)
    environment = {
        "python": "3.11.9",
        "torch": "2.13.0",
        "platform": "Linux x86_64",
        "cpu": "a made-up processor",
        "cores": 2,
        "threads": 1,
        "device": "cpu",
        "gpu": None,
        "precision": "bf16",
        "compiled": True,
        "compile_note": "",
        "commit": "0" * 40,
        "started": f"2026-01-01T00:0{seed}:00Z",
    }
    offset, tree = a.get("seed_offset", 0), {"format": 1, **a["config"]}
    tree["train"] = {**tree["train"], "seed": seed + offset}
    if offset:
        tree["data"] = {**tree["data"], "order_seed": seed}
    run.create(json.dumps(tree), "hash", environment)
    noise = random.Random(f"{a['name']}/{seed}")
    shift = random.Random(seed).gauss(0, 0.02)  # shared by the arms of a seed, as their batches are
    own = noise.gauss(0, 0.004)
    lines: list[dict[str, Any]] = []
    last = steps if fate in ("finished", "other-batches") else min(140, steps)
    for step in range(last + 1):
        ideal = 3.4 + shift + own + 4.2 * math.exp(-step / 60) + 0.6 * (1 - step / steps)
        ideal -= a["gain"] * min(1, 2 * step / steps)
        if step % every == 0 or (step == last == steps):
            loss = finals.get((a["name"], seed), ideal) if step == steps else ideal
            lines.append({"step": step, "split": "val", "loss": loss, "tokens": 65_536})
            if "test" in a["config"]["eval"].get("splits", ()):
                last_loss = dict(a.get("test", ())).get(seed, loss + 0.01)
                lines.append({**lines[-1], "split": "test", "loss": last_loss if step == steps else loss + 0.01})
        if step > 0:
            data = f"{seed}/{step}" + (a["name"] if fate == "other-batches" and step >= 7 else "")
            line = {"step": step, "loss": ideal + noise.gauss(0, 0.05), "lr": 1e-3, "grad_norm": 1.0}
            line |= {"tokens": 2048 * step, "seconds": step * 0.1 * (1 + 0.01 * seed)}
            lines.append({**line, "batch_sha": hashlib.sha256(data.encode()).hexdigest()})
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    if fate != "running":
        why = {"diverged": "the loss is not finite", "failed": "out of memory", "stopped": "interrupted"}.get(fate, "")
        run.set_status("finished" if fate == "other-batches" else fate, step=last, why=why)  # type: ignore[arg-type]


def record(folder: Path, arm: str, seed: int, measures: dict[str, Any], every: int = 100) -> None:
    """Put invented dynamics on the lines of every so many steps; a measure's values grow by the step in hundreds."""
    run = RunFolder(folder / "runs" / arm / f"seed-{seed}")
    lines = list(run.metrics())
    for line in lines:
        if "split" not in line and (line["step"] == 1 or line["step"] % every == 0):
            grown = {
                m: [None if v is None else v + line["step"] / 100 for v in values] for m, values in measures.items()
            }
            line["dynamics"] = grown
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _search(arms: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    scores, chosen = [], {}
    for a in (a for a in arms if a.get("matched") is None):
        best = a["config"]["train"]["lr"]
        for lr in (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2):
            for floor in (0.02, 0.1):
                loss = (
                    5.2 + 0.05 * math.log2(lr / best) ** 2 + 0.02 * abs(floor - a["config"]["train"]["min_lr"] / best)
                )
                point = {"train.lr": lr, "train.min_lr": lr * floor}
                broken = lr > 1e-2 and best < 3e-3
                status = "diverged" if broken else "finished"
                scores.append(
                    {"arm": a["name"], "point": point, "seed": 0, "val_loss": None if broken else loss}
                    | {"steps": 400, "status": status}
                )
                if lr == best and math.isclose(lr * floor, a["config"]["train"]["min_lr"]):
                    chosen[a["name"]] = {"point": point, "val_loss": loss}
        point = {"train.lr": best, "train.min_lr": best * 0.1}
        chosen.setdefault(a["name"], {"point": point, "val_loss": 5.2})
    facts = {"evidence": "results/search.json", "axes": ["train.lr"], "seeds": [0], "steps": 400}
    return {**facts, "chosen": chosen, "scores": scores}


def searched(*arms: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The same arms evaluated on `test` as well, and each but the first at the first one's point too."""
    own = [{**a, "config": {**a["config"], "eval": {**a["config"]["eval"], "splits": ["val", "test"]}}} for a in arms]
    rates = {key: own[0]["config"]["train"][key] for key in ("lr", "min_lr", "weight_decay")}
    matched = [
        {
            **a,
            "name": f"{a['name']}@{own[0]['name']}",
            "label": f"{a['label']}, settings of {own[0]['label']}",
            "matched": a["name"],
            "config": {**a["config"], "train": {**a["config"]["train"], **rates}},
            "test": {},
        }
        for a in own[1:]
    ]
    return (*own, *matched)
