from __future__ import annotations

import json

from fake_study import write_study

from qurve.study.evidence import evidence_json
from qurve.study.results import load


def test_digest_of_a_run_is_that_of_its_batches(tmp_path):
    """Equal where the batches are, over the arms of a seed, and nowhere else: not even where one step differs."""
    runs = json.loads(evidence_json(load(write_study(tmp_path, fates={("res-gelu", 2): "other-batches"}))))["runs"]
    digests = {(run["arm"], run["seed"]): run["batches_sha256"] for run in runs}
    for seed in (1, 3):
        assert digests["baseline", seed] == digests["mlp-4.75", seed] == digests["res-gelu", seed]
    assert digests["baseline", 2] == digests["mlp-4.75", 2] != digests["res-gelu", 2]
    assert len(set(digests.values())) == 4
