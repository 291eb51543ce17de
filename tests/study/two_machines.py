"""Makes a study on a Ray cluster of two local "machines" and kills one of them on the way. A script of its own: it uses
addresses of its own on loopback, and Ray asks for this machine's, which a test may not.

    python two_machines.py STUDY_FOLDER DATA_FOLDER
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from qurve.data.loader import TokenData
from qurve.runfolder import RunFolder
from qurve.study.definition import Arm, Study
from qurve.study.execute import run_study
from qurve.study.jobs import run_path
from qurve.study.on_ray import Cluster
from tiny import tiny

SETTINGS = ("train.steps=800", "train.checkpoint_every=20", "eval.every=400", "model.dropout=0.1")
STUDY = Study(
    "two",
    "Two machines",
    (Arm("baseline", "Baseline", tiny(*SETTINGS)), Arm("wide", "Wide", tiny("model.d_ff=96", *SETTINGS))),
    seeds=(1,),
)


def main(folder: Path, data: Path) -> None:
    from ray.cluster_utils import Cluster as Machines

    # Not 127.0.0.1, which Ray takes for this machine's address on the network.
    head = {"num_cpus": 1, "node_ip_address": "127.0.0.2", "include_dashboard": False}
    machines = Machines(initialize_head=True, head_node_args=head)
    other = machines.add_node(num_cpus=1, node_ip_address="127.0.0.3")
    runs = [RunFolder(run_path(folder, arm.name, 1)) for arm in STUDY.arms]

    def kill_when_both_are_under_way() -> None:
        while not all(run.is_begun() and run.last_step() > 50 for run in runs):
            pass_by.wait(0.05)
        machines.remove_node(other, allow_graceful=False)

    pass_by = threading.Event()
    threading.Thread(target=kill_when_both_are_under_way, daemon=True).start()
    try:
        cluster = Cluster(machines.address)
        failed = run_study(STUDY, folder, TokenData.open(data), command="", cluster=cluster, retries=0, say=print)
    finally:
        machines.shutdown()
    sys.exit(bool(failed))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
