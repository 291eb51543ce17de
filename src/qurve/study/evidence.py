"""A study's numbers in one small JSON file: what to keep and cite when the runs themselves are too large to."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from qurve.config import differences
from qurve.study.provenance import provenance
from qurve.study.results import Arm, Run, StudyResults
from qurve.study.statistics import overall_verdict, summary_rows

FORMAT = 1


def evidence_json(results: StudyResults) -> str:
    """Rows, verdict, doubts and split as reported, and of every run its curves, its batches' digest, and where it was
    made."""
    from qurve.study.headline import reservations  # which takes numpy along

    tree = {
        "format": FORMAT,
        "name": results.name,
        "title": results.title,
        "command": results.command,
        "split": results.split,
        "verdict": overall_verdict(results),
        "doubts": reservations(results),
        "rows": summary_rows(results),
        "a_a": [arm.name for arm in results.others if arm.seed_offset],
        "matched": [arm.name for arm in results.matched],
        "configs": {arm.name: arm.config for arm in results.arms},
        "runs": [_run(run) for run in results.runs],
    }
    return json.dumps(tree, indent=1) + "\n"


def _run(run: Run) -> dict[str, Any]:
    digests = "".join(f"{step}:{sha}\n" for step, sha in run.batch_digests.items())
    return {
        "arm": run.arm,
        "seed": run.seed,
        "status": run.status,
        "why": run.why,
        "steps": run.step,
        "val": run.val,
        **({"test": run.test} if run.test else {}),
        "last_train_loss": run.train[-1][1] if run.train else None,
        "batches_sha256": hashlib.sha256(digests.encode()).hexdigest(),
        "tokens_per_s": run.tokens_per_s,
        "environment": run.environment,
    }


MACHINE = ("platform", "cpu", "cores", "gpu", "torch", "precision", "threads", "compiled")


def compact_evidence(results: StudyResults) -> dict[str, Any]:
    """The same without the curves, for studies of many arms: where it comes from, rows, doubts, the report's tables of
    useful units and costs, and of every arm what it changes and each seed's last losses (null where the run did not
    finish; `unfinished` says why)."""
    from qurve.study.claims import scale_of  # which takes numpy along
    from qurve.study.headline import reservations
    from qurve.study.worth import costs_table, gains_table, savings_table

    beside = (gains_table(results), savings_table(results), costs_table(results))
    return {
        "format": FORMAT,
        "name": results.name,
        "title": results.title,
        "command": results.command,
        "machine": machine(results),
        **origin(results),
        "scale": scale_of(results),
        "split": results.split,
        "seeds": list(results.seeds),
        "baseline": results.baseline.name,
        "doubts": reservations(results),
        "rows": summary_rows(results),
        "beside": [dataclasses.asdict(table) for table in beside if table is not None],
        "arms": [_arm(results, arm) for arm in results.arms],
    }


def machine(results: StudyResults) -> dict[str, Any]:
    """Where the runs were made; a list where they were not made alike."""
    found: dict[str, Any] = {}
    for key in MACHINE:
        values = [run.environment[key] for run in results.runs if key in run.environment]
        alike = list({json.dumps(value): value for value in values}.values())
        if alike:
            found[key] = alike[0] if len(alike) == 1 else alike
    return found


def origin(results: StudyResults) -> dict[str, Any]:
    """Where the numbers come from: code, data, order of the batches, the baseline's configuration, every run's hash."""
    found, config = provenance(results), results.baseline.config
    hashes: dict[str, dict[str, str]] = {}
    for (arm, seed), sha in found.configurations.items():
        hashes.setdefault(arm, {})[str(seed)] = sha
    return {
        "origin": {
            "code": list(found.code),
            "data": list(found.data),
            "order": found.order,
            "config": {**config, "data": {**config.get("data", {}), "path": None}},
            "hashes": hashes,
        }
    }


def _arm(results: StudyResults, arm: Arm) -> dict[str, Any]:
    changes = differences(results.baseline.config, arm.config)
    return {
        "arm": arm.name,
        "label": arm.label,
        "changes": {path: mine for path, (_, mine) in changes.items()},
        "match": arm.match,
        "val_loss": {str(seed): run.val_loss for seed, run in arm.runs.items()},
        "final_loss": {str(seed): run.final_loss for seed, run in arm.runs.items()},
        "unfinished": [f"seed {run.seed} {run.in_words}" for run in arm.unfinished],
    }
