"""Whatever stands in a study's files, reading them ends in an answer or in a refusal that names the file."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_study import BASELINE, NONLINEAR, write_study
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from qurve.errors import BadInput
from qurve.runfolder import RunFolder
from qurve.study.definition import Arm, Study
from qurve.study.doubts import doubts
from qurve.study.evaluated import load_evaluation
from qurve.study.evidence import compact_evidence, evidence_json
from qurve.study.jobs import seen_before
from qurve.study.ladder_results import LadderResults, RungArm, RungResults, load_ladder, to_json
from qurve.study.markdown import markdown
from qurve.study.noise import known_from
from qurve.study.pace import Pace, pace_of
from qurve.study.plan import make_plan
from qurve.study.results import load
from qurve.study.statistics import overall_verdict, summary_rows
from qurve.study.tables import tex_table
from qurve.study.watch import Watched, status_json, status_table
from tiny import TINY

Json = Any


def looked_at(folder: Path) -> str:
    states = Watched(folder).look()
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(status_table(states))
    json.loads(status_json(states), parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    return console.export_text()


def reported(folder: Path) -> str:
    results = load(folder)
    parts = [tex_table(results), overall_verdict(results), evidence_json(results), *doubts(results)]
    json.loads(evidence_json(results), parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    return "".join([*parts, json.dumps(summary_rows(results))])


def planned(folder: Path) -> None:
    known = known_from(folder)
    json.dumps(make_plan(PLANNED, 0.01, known, pace=pace_of(known) or Pace((), 1.0, "", None, "")), allow_nan=False)


def continued(folder: Path) -> None:
    arms = [SimpleNamespace(name=arm["name"]) for arm in (BASELINE, NONLINEAR)]
    study = SimpleNamespace(name="small", arms=arms, seeds=(1,), looks=(), baseline="baseline")
    seen_before(study, folder)  # type: ignore[arg-type]


PLANNED = Study("small", "Small", (Arm("baseline", "Baseline", TINY),))
READERS = [looked_at, reported, continued, planned]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(tmp_path_factory.mktemp("whole"), (BASELINE, NONLINEAR), seeds=(1,))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "study"))


# ---------------------------------------------------------------------------------------------------------- study.json


def with_fields(**fields: Json) -> Callable[[Json], Json]:
    return lambda tree: tree | fields


def with_arm(**fields: Json) -> Callable[[Json], Json]:
    return lambda tree: {**tree, "arms": [tree["arms"][0], tree["arms"][1] | fields]}


def without(field: str) -> Callable[[Json], Json]:
    return lambda tree: {key: value for key, value in tree.items() if key != field}


NAMES = ["../../outside", "/etc", "..", ".", "", "a/b", "a\\b", "a\0b", "a\n", "baseline", ["a"], 5, None]
DAMAGES: dict[str, Callable[[Json], Json]] = {
    "a list": lambda tree: [tree],
    "another format": with_fields(format=2),
    "levels": with_fields(search=json.loads("[" * 60 + "]" * 60)),
    "no number": with_fields(title="x", more=[float("nan")]),
    "infinity": with_arm(total=float("inf")),
    "half a character": with_fields(command="\ud800"),
    "an arm of a number": with_fields(arms=[1]),
    **{f"no {field}": without(field) for field in ("name", "arms", "seeds")},
    **{f"arm {name!r}": with_arm(name=name) for name in NAMES},
    **{f"config {value!r}": with_arm(config=value) for value in (5, None, [], {"train": 5})},
    **{f"seeds {value!r}": with_fields(seeds=value) for value in (5, ["1"], [1.5], [True], [[1]], [-1], [], [1, 1])},
    **{f"looks {value!r}": with_fields(looks=value) for value in (5, ["3"], [3.0], [True], [0], {})},
    "offset to a seed of the study": lambda tree: with_arm(seed_offset=1)(tree | {"seeds": [1, 2]}),
    **{f"offset {value!r}": with_arm(seed_offset=value) for value in ("1", 1.5, [], True)},
    **{f"looked {value!r}": with_fields(looked_in_pool=value) for value in (5, [], {"a": 5}, {"a": [[True]]})},
    **{f"earlier {value!r}": with_fields(earlier_seeds=value) for value in (5, [5], [["1"]], {})},
}


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_study_is_refused_by_name_by_all_who_read_it(damage: str, read: Any, folder: Path) -> None:
    file = folder / "study.json"
    file.write_text(json.dumps(DAMAGES[damage](json.loads(file.read_text()))))
    with pytest.raises(BadInput, match=r"study\.json is damaged: .*; restore it, or make the study in another folder"):
        read(folder)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000, b'{"seeds": [' + b"9" * 5000 + b"]}"])
def test_what_is_no_json_is_refused_by_name_by_all_who_read_it(content: bytes, read: Any, folder: Path) -> None:
    (folder / "study.json").write_bytes(content)
    with pytest.raises(BadInput, match=r"study\.json is damaged: not JSON"):
        read(folder)


@pytest.mark.parametrize("place", ["outside", "{absolute}"])
def test_no_arm_leads_out_of_the_folder(place: str, folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    shutil.copytree(folder / "runs" / "baseline", outside)
    name = str(outside) if place == "{absolute}" else "../../outside"
    file = folder / "study.json"
    tree = with_arm(name=name)(json.loads(file.read_text()))
    file.write_text(json.dumps(tree))
    assert (folder / "runs" / name / "seed-1" / "status.json").exists()
    for read in READERS:
        with pytest.raises(BadInput, match=r"study\.json is damaged: an arm's name becomes a folder"):
            read(folder)


def test_a_whole_study_is_read_by_all(folder: Path) -> None:
    assert "finished" in looked_at(folder)
    assert "Baseline" in reported(folder)
    continued(folder)


# ------------------------------------------------------------------------------------------------------ the runs' files

OTHER_JSON = st.sampled_from(
    [
        None,
        True,
        5,
        -1,
        0,
        1.5,
        10**400,
        1e308,
        5e-324,
        float("nan"),
        float("inf"),
        "x",
        "\ud800",
        "\x1b[2J",
        [],
        [1],
        {},
        {"a": [1]},
    ]
)


def places(node: Json, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in inner:
        yield from places(value, (*path, key))


def replaced(node: Json, path: tuple[Any, ...], value: Json) -> Json:
    if not path:
        return value
    copy = node.copy()
    copy[path[0]] = replaced(node[path[0]], path[1:], value)
    return copy


def damage(text: str, data: st.DataObject) -> str:
    tree = json.loads(text)
    path = data.draw(st.sampled_from(list(places(tree))))
    return json.dumps(replaced(tree, path, data.draw(OTHER_JSON)))


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_no_value_of_a_study_breaks_a_reader(data: st.DataObject, whole: Path) -> None:
    file = whole / "study.json"
    text = file.read_text()
    try:
        file.write_text(damage(text, data))
        for read in READERS:
            try:
                read(whole)
            except BadInput as error:
                assert str(whole) in str(error)  # noqa: PT017
    finally:
        file.write_text(text)


@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_no_value_of_a_study_breaks_its_report_in_words(data: st.DataObject, whole: Path) -> None:
    file = whole / "study.json"
    text = file.read_text()
    try:
        file.write_text(damage(text, data))
        markdown(load(whole)).encode()
    except BadInput as error:
        assert str(file) in str(error)  # noqa: PT017
    finally:
        file.write_text(text)


@pytest.mark.parametrize("name", ["lr", "weight_decay", "steps", "tokens_per_step"])
def test_what_every_report_asks_of_an_arm_is_there(name: str, folder: Path) -> None:
    file = folder / "study.json"
    tree = json.loads(file.read_text())
    del tree["arms"][1]["config"]["train"][name]
    file.write_text(json.dumps(tree))
    with pytest.raises(BadInput, match=rf"study\.json is damaged: .*train\.{name} of res-gelu = None"):
        load(folder)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_no_value_in_a_runs_files_breaks_a_reader_or_hides_another_run(data: st.DataObject, whole: Path) -> None:
    run = RunFolder(whole / "runs" / "res-gelu" / "seed-1")
    file = data.draw(st.sampled_from([run.config_file, run.environment_file, run.status_file, run.metrics_file]))
    text = file.read_text()
    before = Watched(whole).look()[0]
    try:
        if file == run.metrics_file:
            lines = text.splitlines()
            at = data.draw(st.sampled_from([0, 1, len(lines) // 2, len(lines) - 2, len(lines) - 1]))
            lines[at] = damage(lines[at], data)
            file.write_text("\n".join(lines) + "\n")
        else:
            file.write_text(damage(text, data))
        states = Watched(whole).look()
        assert (states[0].status, states[0].loss) == (before.status, before.loss)
        assert "\x1b" not in looked_at(whole)
        reported(whole).encode()
        planned(whole)
        assert load(whole).baseline.runs[1].finished
    finally:
        file.write_text(text)


CONTENTS = [b"", b"{", b"[]", b"\xff\n", b"[" * 100_000 + b"\n"]


@pytest.mark.parametrize("content", [*CONTENTS, None], ids=["empty", "torn", "a list", "no text", "deep", "a folder"])
@pytest.mark.parametrize("name", ["config.json", "status.json", "metrics.jsonl"])
def test_a_damaged_run_is_shown_as_such_and_the_others_as_they_are(
    name: str, content: bytes | None, folder: Path
) -> None:
    file = folder / "runs" / "res-gelu" / "seed-1" / name
    file.unlink()
    file.mkdir() if content is None else file.write_bytes(
        content + b"\n" * (name == "metrics.jsonl" and content != b"")
    )
    before, damaged = Watched(folder).look()
    assert (before.status, before.step) == ("finished", 400)
    if (name, content) != ("metrics.jsonl", b""):
        assert damaged.status == "damaged"
        assert name in damaged.why
        assert str(folder) not in damaged.why
        assert "damaged: " in looked_at(folder)
    if name != "config.json":
        run = load(folder).arms[1].runs[1]
        assert (run.val_loss, run.finished) == (None, False)
    assert load(folder).baseline.runs[1].finished


def test_a_damaged_run_leaves_its_arm_without_a_verdict(tmp_path: Path) -> None:
    folder = write_study(tmp_path, (BASELINE, NONLINEAR), seeds=(1, 2, 3, 4))
    (folder / "runs" / "res-gelu" / "seed-2" / "status.json").write_text("")
    results = load(folder)
    assert "no verdict: seed 2 damaged" in overall_verdict(results)  # it may have diverged
    assert any("seed 2 damaged (" in doubt and "status.json" in doubt for doubt in doubts(results))


@pytest.mark.parametrize("key", ["step", "loss", "tokens", "seconds"])
@pytest.mark.parametrize("value", ["x", None, True, [1], 10**400, float("nan"), float("inf")])
def test_a_line_of_metrics_with_a_wrong_value_is_named_and_told_again(key: str, value: Json, folder: Path) -> None:
    run, watched = RunFolder(folder / "runs" / "res-gelu" / "seed-1"), Watched(folder)
    assert watched.look()[1].step == 400
    number = len(run.metrics_file.read_text().splitlines()) + 2
    line = {"step": 401, "loss": 2.0, "tokens": 1, "seconds": 1.0}
    with open(run.metrics_file, "a") as file:
        file.writelines(json.dumps(each) + "\n" for each in (line, line | {key: value}))
    for _ in range(2):
        state = watched.look()[1]
        assert (state.status, f"metrics.jsonl, line {number}: not a line" in state.why) == ("damaged", True)


def test_reasons_are_shown_without_what_would_break_a_terminal_or_a_file(folder: Path) -> None:
    run = RunFolder(folder / "runs" / "res-gelu" / "seed-1")
    run.set_status("failed", step=1, why="\x1b[2J\ud800gone\nfor good")
    assert Watched(folder).look()[1].why == load(folder).arms[1].runs[1].why == "[2Jgone for good"


@pytest.mark.parametrize("value", ["\ud800", json.loads("[" * 60 + "]" * 60)])
def test_an_environment_that_cannot_be_written_again_is_damage(value: Json, folder: Path) -> None:
    RunFolder(folder / "runs" / "res-gelu" / "seed-1").add_to_environment({"cpu": value})
    assert load(folder).arms[1].runs[1].status == "damaged"


def test_a_batchs_digest_that_is_none_is_damage(folder: Path) -> None:
    run = RunFolder(folder / "runs" / "res-gelu" / "seed-1")
    run.append({**run.train_lines()[-1], "step": 401, "batch_sha": "\ud800"})
    assert load(folder).arms[1].runs[1].status == "damaged"


@pytest.mark.parametrize("name", ["lr", "min_lr", "weight_decay", "steps"])
@pytest.mark.parametrize("value", ["x", True, [1], 10**400])
def test_a_reported_setting_is_a_number(name: str, value: Json, folder: Path) -> None:
    file = folder / "study.json"
    tree = json.loads(file.read_text())
    tree["arms"][1]["config"]["train"][name] = value
    file.write_text(json.dumps(tree))
    with pytest.raises(
        BadInput, match=rf"study\.json is damaged: a field has the wrong type \(train\.{name} of res-gelu"
    ):
        load(folder)


# -------------------------------------------------------------------------------------------- what can be reckoned with

ODD: list[Json] = [None, True, "x", "", [], [[1]], {"a": 1}, -1, float("nan"), float("inf"), 1e308, 5e-324, 10**400]
"""None of these is a count, or a number above zero."""
ids = "{!r:.12}".format


def set_in(file: Path, path: tuple[Any, ...], value: Json) -> None:
    file.write_text(json.dumps(replaced(json.loads(file.read_text()), path, value)))


@pytest.mark.parametrize("field", ["non_embedding", "total", "flops_per_token"])
@pytest.mark.parametrize("value", [*ODD, 0], ids=ids)
def test_what_costs_are_reckoned_from_is_above_zero(field: str, value: Json, folder: Path) -> None:
    set_in(folder / "study.json", ("arms", 0, field), value)
    with pytest.raises(BadInput, match=r"study\.json is damaged: .*; restore it"):
        load(folder)


@pytest.mark.parametrize("seed", [10**300, 2**62 + 1])
def test_a_seed_can_be_a_folders_name(seed: int, folder: Path) -> None:
    set_in(folder / "study.json", ("seeds", 0), seed)
    for read in READERS:
        with pytest.raises(BadInput, match=r"study\.json is damaged: a seed is a whole number from 0 to"):
            read(folder)


@pytest.mark.parametrize("name", ["threads", "commit", "cpu"])
@pytest.mark.parametrize("value", [[], [["a"]], {"a": 1}, float("nan"), 10**400], ids=ids)
def test_an_environment_is_of_plain_values(name: str, value: Json, folder: Path) -> None:
    file = folder / "runs" / "res-gelu" / "seed-1" / "environment.json"
    set_in(file, (name,), value)
    before, damaged = load(folder).runs
    assert (before.status, damaged.status) == ("finished", "damaged")
    assert f"environment.json is damaged: {name!r} has the wrong type" in damaged.why
    reported(folder)


LINES = {
    "max_logit": ["ab", {"a": 1}, 5, ["a"], [[1]], [True], [10**400], [float("nan")], [1e308]],
    "loss": [0, -1, 1e308, 5e-324, 10**400],
    "tokens": [-1, 10**400, 1.5],
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in LINES.items() for v in values], ids=ids)
def test_a_last_evaluation_that_none_can_be_is_damage(field: str, value: Json, folder: Path) -> None:
    run = RunFolder(folder / "runs" / "res-gelu" / "seed-1")
    *before, last = run.metrics_file.read_text().splitlines()
    lines = [line for line in (*before, last) if '"split"' in line]
    run.metrics_file.write_text("\n".join([*before, last, json.dumps(json.loads(lines[-1]) | {field: value})]) + "\n")
    found = load(folder).arms[1].runs[1]
    assert (found.status, found.final_loss) == ("damaged", None)
    reported(folder)


ANSWERS = {"sha256": "a", "chance": 0.5, "correct": "1010", "correct_norm": None}
ANSWERED: Json = {
    "format": 1,
    "precision": "float32",
    "runs": [{"arm": "res-gelu", "seed": 1, "checkpoint": "x", "tasks": {"quiz": ANSWERS}}],
}
PLACES: dict[tuple[Any, ...], list[Json]] = {
    ("runs", 0, "seed"): [float("inf"), "x", None, [1]],
    ("runs", 0, "tasks", "quiz", "chance"): ["x", [1], 10**400, float("nan"), -1, 1e308],
    ("runs", 0, "tasks", "quiz", "sha256"): [None, 5, [1]],
    ("runs", 0, "tasks", "quiz", "correct"): [None, 5, [1], ["1"], "12"],
    ("runs", 0, "tasks", "quiz"): [None, 5, {}, {**ANSWERS, "more": 1}],
    ("format",): [2, None],
    ("runs",): [5, None],
}


@pytest.mark.parametrize(("path", "value"), [(p, v) for p, values in PLACES.items() for v in values], ids=ids)
def test_answers_that_none_can_be_are_refused(path: tuple[Any, ...], value: Json, folder: Path) -> None:
    file = folder / "evaluation.json"
    file.write_text(json.dumps(ANSWERED))
    assert load_evaluation(load(folder)) is not None
    set_in(file, path, value)
    with pytest.raises(BadInput, match=r"evaluation\.json is damaged: .*; remove it and evaluate the study again"):
        load_evaluation(load(folder))


def ladder_of(file: Path) -> None:
    arms = {name: RungArm(name, name, 1000, 2000, 6000.0, {1: 3.0, 2: 3.1}) for name in ("baseline", "new")}
    rungs = [RungResults(f"{n}x32", n, 32, 20.0, 20_000 * n, 0.5, arms, {"cpu": "one"}) for n in (1, 2)]
    file.write_text(to_json(LadderResults("small", "Small", "", "baseline", "f", tuple(rungs))))


LADDER = [("rungs", 0, key) for key in ("n_layers", "d_model", "tokens_per_parameter", "tokens", "epochs")] + [
    ("rungs", 0, "arms", "new", *path)
    for path in (("non_embedding",), ("total",), ("flops_per_token",), ("losses", "1"))
]


@pytest.mark.parametrize("path", LADDER, ids=str)
@pytest.mark.parametrize("value", ["x", 0, float("nan"), 1e308, 10**400], ids=ids)
def test_a_ladder_that_none_can_be_is_refused(path: tuple[Any, ...], value: Json, tmp_path: Path) -> None:
    file = tmp_path / "ladder.json"
    ladder_of(file)
    assert load_ladder(file).rungs
    set_in(file, path, value)
    with pytest.raises(BadInput, match=r"ladder\.json is damaged: .*; restore it, or repeat the `qurve study ladder`"):
        load_ladder(file)


EVIDENCE: dict[tuple[str, tuple[Any, ...]], list[Json]] = {
    ("whole", ("runs", 0, "seed")): [[], "x", float("inf")],
    ("whole", ("runs", 0, "val", -1, 1)): [[], "x", -1, 0, 1e308, 10**400],
    ("whole", ("rows", 0, "tokens_per_s")): [[], "x", 0, 5e-324, 10**400],
    ("compact", ("arms", 0, "final_loss", "1")): ["x", 0, float("inf"), 10**400],
    ("compact", ("rows", 0, "tokens_per_s")): ["x", 10**400],
}


@pytest.mark.parametrize(("place", "value"), [(p, v) for p, values in EVIDENCE.items() for v in values], ids=ids)
def test_evidence_that_none_can_be_is_refused(
    place: tuple[str, tuple[Any, ...]], value: Json, whole: Path, tmp_path: Path
) -> None:
    kind, path = place
    file, results = tmp_path / "kept.json", load(whole)
    file.write_text(evidence_json(results) if kind == "whole" else json.dumps(compact_evidence(results)))
    known_from(file)
    set_in(file, path, value)
    with pytest.raises(BadInput, match=r"kept\.json is no study's evidence: .*; give a study's folder"):
        known_from(file)
