"""A study's numbers in one small JSON file: what to keep and cite when the runs themselves are too large to."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from qurve.study.results import Run, StudyResults
from qurve.study.statistics import overall_verdict, summary_rows

FORMAT = 1


def evidence_json(results: StudyResults) -> str:
    """Rows, verdict and split as reported, and of every run its curves, its batches' digest, and where it was made."""
    tree = {
        "format": FORMAT,
        "name": results.name,
        "title": results.title,
        "command": results.command,
        "split": results.split,
        "verdict": overall_verdict(results),
        "rows": summary_rows(results),
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
