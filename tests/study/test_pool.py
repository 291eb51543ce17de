"""One pool of runs under several studies."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qurve.data.loader import TokenData
from qurve.errors import BadInput, Busy
from qurve.files import LOCK, claimed
from qurve.runfolder import RunFolder
from qurve.study import execute, jobs, local
from qurve.study.definition import Arm, Study
from qurve.study.doubts import doubts
from qurve.study.execute import run_study
from qurve.study.jobs import Job, run_path
from qurve.study.looks import Seen
from qurve.study.pool import in_pool, link, look_again, run_evidence, write_evidence
from qurve.study.results import load
from qurve.train.config import RunConfig
from tiny import InProcess, tiny


def make_study(name: str, *arms: str, seeds: tuple[int, ...] = (1,)) -> Study:
    widths = {"baseline": "model.d_ff=64", "wide": "model.d_ff=96", "wider": "model.d_ff=128"}
    made = tuple(Arm(arm, arm.title(), tiny("train.steps=2", widths[arm])) for arm in ("baseline", *arms))
    return Study(name, name.title(), made, seeds)


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "ProcessPoolExecutor", InProcess)
    monkeypatch.setattr(execute, "SECONDS_BETWEEN_LOOKS", 0)


@pytest.fixture
def every_run_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each had come to a loss."""
    monkeypatch.setattr("qurve.study.looks.was_seen", lambda run: True)


def run(study: Study, folder: Path, data: TokenData, pool: Path | None, **more: Any) -> list[str]:
    said: list[str] = []
    failed = run_study(study, folder, data, command="", workers=1, pool=pool, say=said.append, **more)
    assert failed == {}
    return said


def started(said: list[str]) -> list[str]:
    return [text.partition("] ")[2].partition(":")[0] for text in said if text.startswith("[")]


def test_two_studies_make_what_they_share_once(data: TokenData, tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    assert started(run(make_study("first", "wide"), tmp_path / "first", data, pool)) == [
        "baseline, seed 1",
        "wide, seed 1",
    ]
    said = run(make_study("second", "wider"), tmp_path / "second", data, pool)
    assert started(said) == ["wider, seed 1"]
    assert any("1 of 2 runs are made already and kept" in text for text in said)
    places = [os.path.realpath(run_path(tmp_path / name, "baseline", 1)) for name in ("first", "second")]
    assert places[0] == places[1]
    assert sum(place.is_dir() for place in pool.iterdir()) == 3
    for name in ("first", "second"):
        assert all(run.finished for run in load(tmp_path / name).runs)


def looked(folder: Path) -> list[str]:
    return [doubt for doubt in doubts(load(folder)) if "a second look" in doubt]


@pytest.mark.usefixtures("every_run_was_seen")
def test_a_pool_remembers_with_which_seeds_a_comparison_was_looked_at(tmp_path: Path) -> None:
    """Through what it is told of each study; no run needs to be made."""

    def begun(name: str, seeds: tuple[int, ...], looks: tuple[int, ...] = (), *arms: str) -> list[str]:
        study = dataclasses.replace(make_study(name, *(arms or ("wide",)), seeds=seeds), looks=looks)
        (tmp_path / name).mkdir(exist_ok=True)
        seen = jobs.seen_before(study, tmp_path / name)
        seen = look_again(tmp_path / "pool", study, jobs.jobs_of(study, tmp_path / name), seen)
        (tmp_path / name / "study.json").write_text(study.to_json("", seen))
        return looked(tmp_path / name)

    assert begun("few", (1, 2)) == []
    assert begun("first", (1, 2, 3)) == []
    (doubt,) = begun("second", (1, 2, 3, 4, 5))
    assert doubt.startswith("Wide: an earlier study of the same pool")
    assert "(1, 2, 3)" in doubt
    assert begun("again", (1, 2, 3, 4, 5)) == [doubt]  # whatever folder it is made in
    assert begun("second", (1, 2, 3, 4, 5)) == [doubt]
    assert begun("first", (1, 2, 3)) == []  # it came before them
    assert "(1, 2; 1, 2, 3; 1, 2, 3, 4, 5)" in begun("fewer", (1, 3))[0]  # a choice among seeds
    assert begun("other", (1, 2, 3, 4), (), "wider") == []  # another comparison
    both = begun("both", (1, 2, 3, 4, 5, 6), (), "wide", "wider")
    assert [doubt.partition(":")[0] for doubt in both] == ["Wide", "Wider"]


@pytest.mark.usefixtures("every_run_was_seen")
def test_declared_looks_are_no_second_ones(tmp_path: Path) -> None:
    def found(looks: tuple[int, ...], *seeds: int) -> dict[str, list[list[int]]]:
        study = dataclasses.replace(make_study("s", "wide", seeds=seeds), looks=looks)
        return look_again(tmp_path, study, jobs.jobs_of(study, tmp_path), Seen()).in_pool

    assert found((3, 5), 1, 2, 3) == found((3, 5), 1, 2, 3, 4, 5) == {}
    assert found((3, 5, 6), 1, 2, 3, 4, 5, 6) == {"wide": [[1, 2, 3], [1, 2, 3, 4, 5]]}  # declared after the fact
    with open(tmp_path / "looks.jsonl", "a") as file:
        file.write('{"torn')
    assert found((), 1, 2, 3) == {"wide": [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]]}


def test_a_study_notes_its_look_and_keeps_what_it_saw(data: TokenData, tmp_path: Path) -> None:
    run(make_study("first", "wide", seeds=(1, 2, 3)), tmp_path / "first", data, tmp_path / "pool")
    more = make_study("more", "wide", seeds=(1, 2, 3, 4))
    run(more, tmp_path / "more", data, tmp_path / "pool")
    assert len(looked(tmp_path / "more")) == 1
    run(more, tmp_path / "more", data, None)
    assert len(looked(tmp_path / "more")) == 1


def open_threads(study: Study) -> Study:
    def opened(config: RunConfig) -> RunConfig:
        return dataclasses.replace(config, train=dataclasses.replace(config.train, threads=None))

    return dataclasses.replace(study, arms=tuple(dataclasses.replace(a, config=opened(a.config)) for a in study.arms))


@pytest.mark.parametrize("pool", [None, "pool"])
def test_a_study_goes_on_with_the_threads_that_it_began_with(
    pool: str | None, data: TokenData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call with more runs divides the cores among more workers, and so does a larger machine."""
    place = None if pool is None else tmp_path / pool
    monkeypatch.setattr("qurve.train.runtime.available_cores", lambda: 4)
    few, more = (open_threads(make_study("s", "wide", seeds=seeds)) for seeds in ((1,), (1, 2)))
    assert len(started(run(few, tmp_path / "study", data, place))) == 2
    monkeypatch.setattr("qurve.train.runtime.available_cores", lambda: 2)
    assert started(run(more, tmp_path / "study", data, place)) == ["baseline, seed 2", "wide, seed 2"]
    threads = {r.seed: r.environment["threads"] for r in load(tmp_path / "study").runs}
    assert threads == {1: 4, 2: 2}
    assert any("differ in threads" in doubt for doubt in doubts(load(tmp_path / "study")))


def bounded(bound: float | None) -> Study:
    settings = () if bound is None else (f"train.loss_bound={bound}", "train.loss_bound_steps=1")
    return Study("s", "S", (Arm("baseline", "Baseline", tiny("train.steps=2", *settings)),), (1,))


@pytest.mark.parametrize(
    ("first", "then", "statuses", "shared"),
    [
        (0.1, None, ["diverged", "finished"], False),
        (None, 0.1, ["finished", "diverged"], False),
        (0.1, 0.2, ["diverged", "diverged"], False),
        (None, 99.0, ["finished", "finished"], True),
        (99.0, None, ["finished", "finished"], True),
        (0.1, 0.1, ["diverged", "diverged"], True),
    ],
)
def test_a_run_is_shared_only_where_it_would_have_ended_alike(
    first: float | None, then: float | None, statuses: list[str], shared: bool, data: TokenData, tmp_path: Path
) -> None:
    for name, bound in (("a", first), ("b", then)):
        run(bounded(bound), tmp_path / name, data, tmp_path / "pool")
    assert [load(tmp_path / name).baseline.runs[1].status for name in ("a", "b")] == statuses
    assert run_path(tmp_path / "b", "baseline", 1).is_symlink() == shared
    if not shared:
        with pytest.raises(BadInput, match=r"would have ended otherwise with this train\.loss_bound"):
            run(bounded(then), tmp_path / "a", data, None)
        tree = json.loads((tmp_path / "a" / "study.json").read_text())
        tree["arms"][0]["config"]["train"] |= {"loss_bound": then, "loss_bound_steps": 1}
        (tmp_path / "a" / "study.json").write_text(json.dumps(tree))
        assert load(tmp_path / "a").baseline.runs[1].status == "damaged"


@pytest.mark.parametrize(
    ("first", "then", "shared"),
    [
        ((), ("train.dynamics_every=1",), False),
        ((), ("train.keep_every=2",), False),
        ((), ("eval.attention_logits=true",), False),
        ((), ("train.stop_at=1",), False),
        (("train.stop_at=1",), (), False),
        (("train.dynamics_every=2",), ("train.dynamics_every=1",), False),
        (("train.dynamics_every=1",), ("train.dynamics_every=2",), True),
        (("eval.attention_logits=true", "train.keep_every=1"), (), True),
    ],
)
def test_a_run_is_shared_only_where_it_goes_as_far_and_records_as_much(
    first: tuple[str, ...], then: tuple[str, ...], shared: bool, data: TokenData, tmp_path: Path
) -> None:
    for name, settings in (("a", first), ("b", then)):
        arm = Arm("baseline", "Baseline", tiny("train.steps=2", *settings))
        run(Study("s", "S", (arm,), (1,)), tmp_path / name, data, tmp_path / "pool")
    assert run_path(tmp_path / "b", "baseline", 1).is_symlink() == shared
    assert load(tmp_path / "b").baseline.runs[1].step == (1 if "train.stop_at=1" in then else 2)


def test_a_place_in_the_pool_is_the_hash_of_the_resolved_configuration_and_the_link_is_relative(
    data: TokenData, tmp_path: Path
) -> None:
    run(make_study("first"), tmp_path / "here" / "first", data, tmp_path / "here" / "pool")
    path = run_path(tmp_path / "here" / "first", "baseline", 1)
    tree, stored = RunFolder(path).config_json()
    assert Path(os.path.realpath(path)).name == stored
    assert tree["data"]["fingerprint"] == data.fingerprint
    assert not Path(os.readlink(path)).is_absolute()
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert load(tmp_path / "there" / "first").baseline.runs[1].finished


def test_a_link_to_a_run_that_serves_less_leads_to_the_pool_all_the_same(data: TokenData, tmp_path: Path) -> None:
    """What the study made there is what it finds there: it never trains through its own link."""
    pool, study = tmp_path / "pool", make_study("first")
    run(study, tmp_path / "first", data, pool)
    (job,) = resolved_jobs(study.change(["train.dynamics_every=1"]), tmp_path / "first", data, pool)
    assert job.link == run_path(tmp_path / "first", "baseline", 1)
    assert (job.folder.parent, job.folder.is_symlink()) == (pool, False)
    (elsewhere,) = resolved_jobs(study.change(["train.dynamics_every=1"]), tmp_path / "second", data, pool)
    assert elsewhere.link is None


def test_other_seeds_data_and_threads_have_other_places(tmp_path: Path) -> None:
    arm = Arm("baseline", "Baseline", tiny())
    job = Job(arm, 1, tiny(), tmp_path / "run")
    settings = ("train.seed=2", "data.fingerprint=f", "train.threads=2", "train.device=cuda")
    places = {in_pool(dataclasses.replace(job, config=tiny(each)), tmp_path).folder for each in settings}
    assert len(places) == len(settings)
    assert in_pool(job, tmp_path).folder not in places


def test_a_study_of_its_own_stays_so_and_a_pooled_one_goes_on_without_its_pool_named(
    data: TokenData, tmp_path: Path
) -> None:
    pool = tmp_path / "pool"
    run(make_study("own"), tmp_path / "own", data, None)
    run(make_study("own"), tmp_path / "own", data, pool)
    assert not run_path(tmp_path / "own", "baseline", 1).is_symlink()
    assert not pool.exists()
    run(make_study("pooled"), tmp_path / "pooled", data, pool)
    assert started(run(make_study("pooled"), tmp_path / "pooled", data, None)) == []


def test_a_link_to_another_run_is_refused_and_one_that_leads_nowhere_is_mended(data: TokenData, tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    run(make_study("first"), tmp_path / "first", data, pool)
    with pytest.raises(BadInput, match=r"another configuration \(train\.lr"):
        run(make_study("first").change(["train.lr=0.5"]), tmp_path / "first", data, pool)
    shutil.rmtree(pool)
    assert started(run(make_study("first"), tmp_path / "first", data, pool)) == ["baseline, seed 1"]
    assert load(tmp_path / "first").baseline.runs[1].finished


def test_a_run_that_another_study_is_making_waits_until_the_others_are_done(data: TokenData, tmp_path: Path) -> None:
    """The other study's hand is on the baseline until the wide arm is made here."""
    pool, study = tmp_path / "pool", make_study("second", "wide")
    (job,) = [j for j in resolved_jobs(study, tmp_path / "second", data, pool) if j.arm.name == "baseline"]
    job.folder.mkdir(parents=True)
    said: list[str] = []
    with claimed(job.folder):

        def say(text: str) -> None:
            said.append(text)
            if "wide, seed 1:" in text:  # now the other lets go
                (job.folder / LOCK).unlink()

        failed = run_study(study, tmp_path / "second", data, command="", workers=1, pool=pool, say=say)
    assert failed == {}
    assert len([text for text in said if "baseline, seed 1: another process is working on" in text]) == 1
    assert started(said) == ["wide, seed 1", "baseline, seed 1"]
    assert all(run.finished for run in load(tmp_path / "second").runs)


def resolved_jobs(study: Study, folder: Path, data: TokenData, pool: Path) -> list[Job]:
    planned = jobs.jobs_of(study, folder)
    configs = jobs.resolved([job.config for job in planned], 2, str(data.folder))
    return [in_pool(dataclasses.replace(j, config=c), pool) for j, c in zip(planned, configs, strict=True)]


def test_a_busy_run_is_no_failure(data_folder: Path, tmp_path: Path) -> None:
    job = Job(Arm("a", "A", tiny()), 1, tiny(), tmp_path / "a")
    job.folder.mkdir()
    with claimed(job.folder):
        outcome = jobs.make(job, "cpu", str(data_folder))
        with pytest.raises(Busy), claimed(job.folder):
            raise AssertionError("taken twice")
    assert outcome.kind == "busy"
    assert not RunFolder(job.folder).is_begun()


def test_an_interruption_does_not_mark_a_run_that_another_study_has_gone_on_with(tmp_path: Path) -> None:
    RunFolder(tmp_path / "a").create("{}", "", {})
    job = Job(Arm("a", "A", tiny()), 1, tiny(), tmp_path / "a")
    with claimed(job.folder):
        assert execute._mark_dead(job, "stopped", "interrupted") == "interrupted"
    assert RunFolder(tmp_path / "a").status()["status"] == "running"
    execute._mark_dead(job, "stopped", "interrupted")
    assert RunFolder(tmp_path / "a").status()["status"] == "stopped"


def test_a_link_that_cannot_be_made_names_the_pool(tmp_path: Path) -> None:
    (tmp_path / "pool").write_text("a file")
    job = in_pool(Job(Arm("a", "A", tiny()), 1, tiny(), tmp_path / "run"), tmp_path / "pool")
    with pytest.raises(BadInput, match="give another --pool"):
        link(job)


TOGETHER = """
import sys
from pathlib import Path
from qurve.data.loader import TokenData
from qurve.study.definition import Arm, Study
from qurve.study.execute import run_study
from tiny import tiny

if __name__ == "__main__":
    folder, pool, data, *order = sys.argv[1:]
    arms = tuple(Arm(f"d{d_ff}", d_ff, tiny("train.steps=60", f"model.d_ff={d_ff}")) for d_ff in order)
    study = Study("together", "Together", arms, (1, 2), baseline=arms[0].name)
    failed = run_study(study, Path(folder), TokenData.open(data), command="", workers=1, retries=0, pool=Path(pool))
    sys.exit(len(failed))
"""


@pytest.mark.slow
def test_two_studies_at_work_at_once_make_no_run_twice(data_folder: Path, tmp_path: Path) -> None:
    script, pool = tmp_path / "study.py", tmp_path / "pool"
    script.write_text(TOGETHER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    orders = {"first": ("64", "96", "128"), "second": ("128", "64", "160")}
    at_work = [
        subprocess.Popen(
            [sys.executable, script, tmp_path / name, pool, data_folder, *order],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, order in orders.items()
    ]
    told = [process.communicate(timeout=300)[0] for process in at_work]
    assert [process.returncode for process in at_work] == [0, 0], told
    runs = [RunFolder(path) for path in pool.iterdir() if path.is_dir()]
    assert len(runs) == 8
    for run in runs:
        assert [line["step"] for line in run.train_lines()] == list(range(1, 61))
        assert "resumed" not in run.environment()
    for name in orders:
        assert all(run.finished for run in load(tmp_path / name).runs)


# ------------------------------------------------------------------------------------------------------------ evidence


def test_evidence_of_a_run_is_its_numbers_without_a_path(finished: RunFolder, tmp_path: Path) -> None:
    assert write_evidence([finished.path], tmp_path) == 1
    tree, stored = finished.config_json()
    (file,) = tmp_path.iterdir()
    found = json.loads(file.read_text())
    assert file.name == f"{stored}.json"
    assert (found["hash"], found["status"], found["steps"], found["diverged_at"]) == (stored, "finished", 4, None)
    assert found["losses"] == {"val": [[line["step"], line["loss"]] for line in finished.eval_lines()]}
    assert found["final"] == {"val": finished.eval_lines()[-1]["loss"]}
    norms = sorted(line["grad_norm"] for line in finished.train_lines())
    assert found["grad_norm"] == {"largest": norms[-1], "median": (norms[1] + norms[2]) / 2}
    last = finished.train_lines()[-1]
    assert found["tokens_per_s"] == last["tokens"] / last["seconds"]
    assert found["config"] == {**tree, "data": {**tree["data"], "path": None}}
    assert found["max_logit"] is None
    assert str(Path(tree["data"]["path"]).parent) not in file.read_text()
    assert found["environment"]["torch"] == finished.environment()["torch"]


def test_evidence_tells_where_a_run_diverged_and_its_largest_logit(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.create('{"format": 1, "data": {"path": "/somewhere"}}', "cafe", {"cpu": "made up"})
    line = {"step": 1, "loss": 5.0, "lr": 0.1, "grad_norm": 2.0, "tokens": 8, "seconds": 1.0, "batch_sha": ""}
    run.append({"step": 0, "split": "val", "loss": 6.0, "tokens": 1, "max_logit": [1.5, None]})
    run.append(line)
    run.append({"step": 1, "split": "val", "loss": 5.5, "tokens": 1, "max_logit": [1.0, 4.5]})
    run.set_status("diverged", step=1, why="planted")
    found = run_evidence(run)
    assert (found["status"], found["diverged_at"], found["max_logit"]) == ("diverged", 1, 4.5)
    assert (found["final"], found["losses"]) == ({"val": None}, {"val": [(0, 6.0), (1, 5.5)]})
    assert (found["tokens_per_s"], found["config"]["data"]) == (8.0, {"path": None})


def test_evidence_passes_over_what_is_not_made_or_damaged(finished: RunFolder, tmp_path: Path) -> None:
    for name, change in (("running", {"status": "running"}), ("damaged", {"status": "odd"})):
        shutil.copytree(finished.path, tmp_path / name)
        file = tmp_path / name / "status.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    (tmp_path / "empty").mkdir()
    assert write_evidence([path for path in tmp_path.iterdir() if path.is_dir()], tmp_path / "out") == 0
