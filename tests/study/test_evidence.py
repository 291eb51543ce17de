from __future__ import annotations

import json

from fake_study import write_study

from qurve.runfolder import RunFolder
from qurve.study.evidence import compact_evidence, evidence_json, machine
from qurve.study.headline import reservations
from qurve.study.provenance import provenance
from qurve.study.results import load


def test_digest_of_a_run_is_that_of_its_batches(tmp_path):
    """Equal where the batches are, over the arms of a seed, and nowhere else: not even where one step differs."""
    runs = json.loads(evidence_json(load(write_study(tmp_path, fates={("res-gelu", 2): "other-batches"}))))["runs"]
    digests = {(run["arm"], run["seed"]): run["batches_sha256"] for run in runs}
    for seed in (1, 3):
        assert digests["baseline", seed] == digests["mlp-4.75", seed] == digests["res-gelu", seed]
    assert digests["baseline", 2] == digests["mlp-4.75", 2] != digests["res-gelu", 2]
    assert len(set(digests.values())) == 4


def test_without_curves_every_arm_has_its_changes_and_losses(tmp_path):
    results = load(write_study(tmp_path, fates={("res-gelu", 2): "diverged"}))
    tree = json.loads(json.dumps(compact_evidence(results), allow_nan=False))
    assert [row["arm"] for row in tree["rows"]] == ["baseline", "mlp-4.75", "res-gelu"]
    first, wider, nonlinear = tree["arms"]
    assert first["changes"] == {}
    assert wider["changes"] == {"model.d_ff": 608, "train.lr": 4e-3, "train.min_lr": 4e-4}
    assert first["val_loss"] == {str(run.seed): run.val_loss for run in results.baseline.runs.values()}
    assert nonlinear["val_loss"]["2"] is None
    from_where = tree["origin"]
    assert from_where["config"]["train"] == results.baseline.config["train"]
    assert from_where["config"]["data"]["path"] is None
    hashes = provenance(results).configurations
    assert {(arm, int(seed)): sha for arm, of in from_where["hashes"].items() for seed, sha in of.items()} == hashes
    assert (from_where["code"], from_where["order"]) == (list(provenance(results).code), provenance(results).order)
    assert nonlinear["unfinished"] == ["seed 2 diverged (after step 140: the loss is not finite)"]
    assert tree["machine"]["cpu"] == "a made-up processor"


def test_doubts_go_where_the_numbers_go(tmp_path):
    results = load(write_study(tmp_path, fates={("res-gelu", 2): "diverged"}))
    found = reservations(results)
    assert any("seed 2 diverged" in doubt for doubt in found)
    for tree in (compact_evidence(results), json.loads(evidence_json(results))):
        assert tree["doubts"] == found


def test_machines_that_differ_are_all_named(tmp_path):
    write_study(tmp_path)
    RunFolder(tmp_path / "runs" / "res-gelu" / "seed-3").add_to_environment({"torch": "2.14.0"})
    found = machine(load(tmp_path))
    assert found["torch"] == ["2.13.0", "2.14.0"]
    assert found["cores"] == 2
