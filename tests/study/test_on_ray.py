"""A study on a Ray cluster: its tasks, how many there are, and what a lost machine or an interrupt costs."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qurve.data.loader import TokenData
from qurve.errors import BadInput, QurveError
from qurve.files import LOCK, sha256_of
from qurve.runfolder import RunFolder
from qurve.study import local, on_ray
from qurve.study.definition import Arm, Study
from qurve.study.execute import run_study
from qurve.study.jobs import Job, Outcome, run_path
from qurve.study.on_ray import Cluster, RayWorkers
from tiny import InProcess, tiny

# ----------------------------------------------------------------------------------------------------------- in process


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        self.cause = cause


class FakeRay:
    """As much of Ray as is used; tasks are done when they are handed over, unless `ends` says what they end in."""

    def __init__(self, *machines: dict[str, float], clusters: bool = True) -> None:
        names = "NodeDied LocalRayletDied WorkerCrashed OutOfMemory TaskCancelled"
        kinds = {f"{name}Error": type(name, (RayError,), {}) for name in names.split()}
        self.exceptions = SimpleNamespace(**kinds, RayError=RayError, RayTaskError=RayTaskError)
        self.machines, self.clusters = list(machines), clusters
        self.options: list[dict[str, Any]] = []
        self.inits: list[dict[str, Any]] = []
        self.cancelled: list[tuple[int, bool]] = []
        self.results: list[Any] = []
        self.ends: list[Any] = []
        self.shutdowns = 0

    def is_initialized(self) -> bool:
        return False

    def init(self, address: str, **options: Any) -> None:
        self.inits.append({"address": address, **options})
        if address != "local" and not self.clusters:
            raise ConnectionError

    def shutdown(self) -> None:
        self.shutdowns += 1

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": bool(machine), "Resources": machine} for machine in self.machines]

    def remote(self, **options: Any) -> Any:
        self.options.append(options)

        def wrap(function: Any) -> Any:
            def call(*arguments: Any) -> int:
                try:
                    self.results.append(self.ends.pop(0) if self.ends else function(*arguments))
                except Exception as error:
                    self.results.append(RayTaskError(error))
                return len(self.results) - 1

            return SimpleNamespace(remote=call)

        return wrap

    def get(self, reference: int) -> Any:
        result = self.results[reference]
        if isinstance(result, Exception):
            raise result
        return result

    def wait(self, references: list[int], num_returns: int = 1, timeout: float | None = None) -> Any:
        return references[:num_returns], references[num_returns:]

    def cancel(self, reference: int, force: bool = False) -> None:
        self.cancelled.append((reference, force))


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay({"CPU": 4.0})
    monkeypatch.setattr(on_ray, "_import_ray", lambda: fake)
    return fake


def job(folder: Path, name: str = "a") -> Job:
    return Job(Arm(name, name, tiny()), 1, tiny(), folder / name)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BadInput, match=re.escape("Ray is not installed: pip install 'qurve[ray]'")):
        RayWorkers(Cluster())


def test_a_worker_can_import_what_the_study_could(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "far_away.py").write_text("class Kind: pass")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    path, call = list(sys.path), pickle.dumps((isinstance, (importlib.import_module("far_away").Kind(), object)))
    sys.modules.pop("far_away")
    monkeypatch.setattr(sys, "path", path[:-1])
    importlib.invalidate_caches()
    assert on_ray._in_worker(path, call) is True
    assert sys.path == path
    sys.modules.pop("far_away")


@pytest.mark.parametrize("address", ["head", "head:", ":6379", "head:x", "ray://head:10001", "head:6379/x"])
def test_an_address_that_is_none_is_refused(address: str, ray: FakeRay) -> None:
    with pytest.raises(BadInput, match="write auto, or the head node's HOST:PORT"):
        RayWorkers(Cluster(address))
    assert ray.inits == []


def test_where_nobody_listens_is_said_at_once(ray: FakeRay) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        RayWorkers(Cluster(address))
        assert [call["address"] for call in ray.inits] == [address]
    for gone in (address, "127.0.0.1:99999"):
        with pytest.raises(BadInput, match=f"no Ray cluster answers at {gone}"):
            RayWorkers(Cluster(gone))
    assert len(ray.inits) == 1


def test_auto_takes_the_cluster_that_is_there_else_starts_a_quiet_one(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    shut: list[bool] = []
    monkeypatch.setattr(on_ray, "_listen_on_loopback_only", lambda: shut.append(True))
    RayWorkers(Cluster())
    assert ([call["address"] for call in ray.inits], shut) == (["auto"], [])
    ray.clusters = False
    RayWorkers(Cluster())
    started = ray.inits[-1]
    assert ([call["address"] for call in ray.inits[1:]], shut) == (["auto", "local"], [True])
    assert started["include_dashboard"] is False


def test_ray_reports_home_only_where_somebody_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    on_ray._import_ray()
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "1"
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED")
    on_ray._import_ray()
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


def test_signals_stay_the_callers(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(ray, "init", lambda **options: signal.signal(signal.SIGTERM, signal.SIG_IGN))
    RayWorkers(Cluster())
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("machines", "cpus", "gpus", "room"),
    [
        ([{"CPU": 4.0}], 1, 0.0, 4),
        ([{"CPU": 4.0}, {"CPU": 3.0}], 2, 0.0, 3),
        ([{"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0}, {}], 2, 1.0, 2),
        ([{"CPU": 8.0, "GPU": 1.0}], 1, 0.1, 8),
        ([{"CPU": 16.0, "GPU": 1.0}], 1, 0.1, 10),
        ([{"CPU": 3.0}, {"CPU": 3.0}], 4, 0.0, 0),
        ([{"CPU": 4.0}], 1, 1.0, 0),
        ([{"GPU": 4.0}], 1, 1.0, 0),
    ],
)
def test_as_many_runs_as_fit_on_single_machines(
    machines: list[dict[str, float]], cpus: int, gpus: float, room: int, ray: FakeRay, tmp_path: Path
) -> None:
    ray.machines = machines
    if not room:
        with pytest.raises(BadInput, match="no machine of the Ray cluster has"):
            RayWorkers(Cluster(cpus_per_run=cpus, gpus_per_run=gpus))
        assert ray.shutdowns == 1
        return
    workers = RayWorkers(Cluster(cpus_per_run=cpus, gpus_per_run=gpus))
    assert ray.options[0] == {"num_cpus": cpus, "num_gpus": gpus, "max_retries": 0}
    waiting = [job(tmp_path, str(n)) for n in range(12)]
    ray.ends = [Outcome("made", "")] * 12
    workers.start(waiting, "")
    assert (len(workers.running), len(waiting)) == (room, 12 - room)
    ray.machines = []  # all are lost: one is handed over, and Ray waits for a machine
    for _ in range(room):
        workers.ended(1)
    workers.start(waiting, "")
    assert len(workers.running) == 1


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        ("NodeDiedError", Outcome("lost", "its machine is gone")),
        ("LocalRayletDiedError", Outcome("lost", "its machine is gone")),
        ("WorkerCrashedError", Outcome("died", "its process died (first line)")),
        ("OutOfMemoryError", Outcome("died", "its process died (first line)")),
        ("TaskCancelledError", Outcome("stopped", "cancelled")),
        ("RayError", Outcome("failed", "last line")),
    ],
)
def test_what_a_task_ends_in(error: str, outcome: Outcome, ray: FakeRay, tmp_path: Path) -> None:
    workers, todo = RayWorkers(Cluster()), job(tmp_path)
    ray.ends = [getattr(ray.exceptions, error)("first line\nlast line")]
    workers.start([todo], "")
    assert workers.ended(1) == [(todo, outcome)]
    assert workers.running == []


def test_stopping_interrupts_the_tasks_and_a_second_time_ends_them(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    workers = RayWorkers(Cluster())
    ray.ends = [Outcome("made", "")] * 2
    workers.start([job(tmp_path, "a"), job(tmp_path, "b")], "")
    monkeypatch.setattr(ray, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        workers.stop()
    assert ray.cancelled == [(0, False), (1, False), (0, True), (1, True)]


def test_the_machines_that_do_the_work_complete_the_configurations(
    ray: FakeRay, data: TokenData, tmp_path: Path
) -> None:
    study = Study("tiny", "Tiny", (Arm("baseline", "Baseline", tiny("train.threads=none", "train.steps=2")),), (1,))
    said: list[str] = []
    cluster = Cluster(cpus_per_run=2)
    assert run_study(study, tmp_path / "study", data, command="", cluster=cluster, say=said.append) == {}
    run = RunFolder(run_path(tmp_path / "study", "baseline", 1))
    assert run.status()["status"] == "finished"
    assert run.config_json()[0]["train"]["threads"] == 2
    assert "1 runs on a Ray cluster, 2 CPUs and 2 threads each, 2 at a time, eager: nothing is compiled" in said
    wrong = Study("tiny", "Tiny", (Arm("baseline", "Baseline", tiny("train.micro_batch=3")),), (1,))
    with pytest.raises(BadInput, match="does not divide the step's 4 sequences"):
        run_study(wrong, tmp_path / "wrong", data, command="", cluster=cluster, say=said.append)
    assert not (tmp_path / "wrong").exists()
    assert ray.shutdowns == 2


@pytest.mark.parametrize("error", [RayTaskError(ModuleNotFoundError("No module named 'qurve'")), RayError("a\nlost")])
def test_machines_that_cannot_plan_are_no_riddle(error: Exception, ray: FakeRay) -> None:
    ray.ends = [error]
    with pytest.raises(QurveError, match=r"\((No module named 'qurve'|lost)\); is the same qurve installed there\?"):
        RayWorkers(Cluster()).resolved([tiny()], "")


def test_a_gpu_has_to_be_asked_of_ray(ray: FakeRay) -> None:
    with pytest.raises(BadInput, match="add --gpus-per-run 1"):
        RayWorkers(Cluster()).resolved([tiny("train.device=cuda")], "")


HOLDER = """
import sys
from pathlib import Path
from qurve.files import claimed
with claimed(Path(sys.argv[1])):
    print(flush=True)
    sys.stdin.read()
"""


def test_a_run_that_a_dying_process_still_holds_is_waited_for(
    data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    todo = job(tmp_path)
    todo.folder.mkdir()
    command = [sys.executable, "-c", HOLDER, todo.folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        waits: list[float] = []

        def until_it_is_gone(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 2:
                holder.kill()
                holder.wait()

        monkeypatch.setattr(on_ray.time, "sleep", until_it_is_gone)
        outcome = on_ray._make_once_free(todo, "cpu", str(data_folder))
    assert len(waits) == 2
    assert outcome.kind == "made"
    assert RunFolder(todo.folder).status()["status"] == "finished"


# ------------------------------------------------------------------------------------------------------------- real Ray

needs_ray = pytest.mark.skipif("not __import__('importlib').util.find_spec('ray')", reason="Ray is not installed")


def numbers(folder: Path) -> dict[str, Any]:
    """All that a disturbed study must have in common with an undisturbed one."""
    found = {}
    for config in sorted(folder.glob("runs/*/*/config.json")):
        run = RunFolder(config.parent)
        assert run.status()["status"] == "finished"
        lines = [{key: value for key, value in line.items() if key != "seconds"} for line in run.metrics()]
        weights = [sha256_of(run.latest_checkpoint() / f"{name}.safetensors") for name in ("model", "optimizer")]
        found[f"{config.parent.parent.name}"] = (run.config_json()[1], lines, weights)
    return found


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "RAY_USAGE_STATS_ENABLED": "0",
    }


@needs_ray
@pytest.mark.slow
def test_a_lost_machines_run_continues_on_another_to_the_same_numbers(
    data: TokenData, data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import two_machines

    script = [sys.executable, two_machines.__file__, tmp_path / "disturbed", data_folder]
    done = subprocess.run(script, env=environment(), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "its machine is gone; it will be continued from its last checkpoint" in done.stdout
    resumed = [
        json.loads(file.read_text()).get("resumed", []) for file in tmp_path.glob("disturbed/**/environment.json")
    ]
    assert sorted(len(entries) for entries in resumed) == [0, 1]
    monkeypatch.setattr(local, "ProcessPoolExecutor", InProcess)
    assert run_study(two_machines.STUDY, tmp_path / "quiet", data, command="", workers=1, say=str) == {}
    assert numbers(tmp_path / "disturbed") == numbers(tmp_path / "quiet")


ON_THIS_MACHINE = """
import functools, sys
from ray._private import services
services.find_gcs_addresses = functools.cache(set)  # no other test's cluster
services.find_bootstrap_address = lambda *_: None
from qurve.cli import main
main(sys.argv[1:])
"""

ONE_ARM = """
from qurve.study.definition import Arm, Study
from tiny import tiny
STUDY = Study("one", "One", (Arm("baseline", "Baseline", tiny("train.steps=400", "eval.every=200")),), seeds=(1,))
"""


def listening(pid: int) -> set[str]:
    """Hexadecimal addresses at which the process and those it has started listen."""
    addresses = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                addresses[f"socket:[{fields[9]}]"] = fields[1].partition(":")[0]
    family, found = {pid}, set()
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    for member in family:
        for link in Path(f"/proc/{member}/fd").glob("*"):
            try:
                found.add(addresses.get(os.readlink(link)))
            except OSError:
                continue
    return {address for address in found if address}


@needs_ray
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="sockets are listed on Linux alone")
def test_a_cluster_started_here_is_out_of_reach_and_an_interrupted_study_goes_on(
    data: TokenData, data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = tmp_path / "one.py"
    study.write_text(ONE_ARM)
    arguments = ["compare", study, "--ray", "auto", "--data", data_folder, "--out", tmp_path / "disturbed"]
    command = [sys.executable, "-c", ON_THIS_MACHINE, *arguments]
    run = RunFolder(run_path(tmp_path / "disturbed", "baseline", 1))
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as driver:
        assert driver.stdout is not None
        try:
            while not (run.is_begun() and run.last_step() > 20):
                assert driver.poll() is None, driver.stdout.read()
            heard = listening(driver.pid)
            driver.send_signal(signal.SIGINT)
            told = driver.communicate(timeout=120)[0].decode()
        finally:
            driver.kill()
    assert heard
    assert heard <= {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert driver.returncode == 130, told
    assert "stopping: running trainings finish their step and save" in told
    state = run.status()
    assert (state["status"], state["step"]) == ("stopped", run.checkpoint_steps()[-1])
    assert not (run.path / LOCK).exists()

    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 that was begun will be continued" in done.stdout
    monkeypatch.setattr(local, "ProcessPoolExecutor", InProcess)
    namespace: dict[str, Any] = {}
    exec(ONE_ARM, namespace)
    assert run_study(namespace["STUDY"], tmp_path / "quiet", data, command="", workers=1, say=str) == {}
    assert numbers(tmp_path / "disturbed") == numbers(tmp_path / "quiet")
