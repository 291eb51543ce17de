"""The ladder: each rung is a full schedule at its size, and it goes on where it was cut short."""

from __future__ import annotations

import dataclasses
import hashlib
import html
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commands import call, snapshot, words
from qurve import presets
from qurve.accounting import count
from qurve.config import apply_settings, differences
from qurve.data.loader import TokenData
from qurve.errors import BadInput
from qurve.runfolder import RunFolder
from qurve.study import local
from qurve.study.execute import run_study
from qurve.study.ladder import BUILT_IN, at_length, at_size, ladder, like, load_definition, run_ladder
from qurve.study.ladder_results import FILE, LadderResults, doubts, load_ladder, other_rungs, series, undecided
from qurve.study.ladder_tables import lines
from qurve.train.config import RunConfig
from tiny import InProcess, tiny


def same(config: RunConfig) -> RunConfig:
    return config


def bottleneck(config: RunConfig) -> RunConfig:
    return apply_settings(config, ["model.query=bottleneck", f"train.lr={config.train.lr / 2}"])


ARMS = {"baseline": same, "res-gelu": bottleneck}
SIZES = ((1, 32), (2, 32))


def tiny_ladder(**more: Any) -> Any:
    options = {"tokens_per_parameter": 0.03, "lengths": (0.06,), "seeds": (1, 2)} | more
    return ladder("tiny", "A tiny ladder", tiny("train.min_lr=0"), SIZES, ARMS, **options)


# ------------------------------------------------------------------------------------------------------------ the rungs


@given(
    n_layers=st.integers(1, 6),
    d_model=st.sampled_from([32, 64, 96, 128, 256, 320, 768]),
    tokens_per_parameter=st.floats(2, 300),
)
def test_a_rung_is_a_full_schedule_of_its_tokens(n_layers: int, d_model: int, tokens_per_parameter: float) -> None:
    base = presets.get("small/baseline")
    one = ladder("l", "L", base, [(n_layers, d_model)], ARMS, tokens_per_parameter=tokens_per_parameter)
    (rung,) = one.rungs
    for arm in rung.study.arms:
        model, train = arm.config.model, arm.config.train
        assert (model.n_layers, model.d_model, model.d_ff) == (n_layers, d_model, 4 * d_model)
        assert model.head_width == (64 if d_model in (256, 320, 768) else 32)
        assert train.updates == train.last_step == train.steps
        wanted = tokens_per_parameter * count(rung.study.arms[0].config.model).non_embedding
        assert train.steps * train.tokens_per_step == pytest.approx(wanted, abs=train.tokens_per_step)
        assert train.warmup_steps / train.steps == pytest.approx(base.train.warmup_steps / base.train.steps, abs=0.01)
    assert 4 <= train.steps / arm.config.eval.every <= 12  # six evaluations, as the base makes, but for rounding


def test_lengths_are_rungs_of_the_first_size_alone_and_arms_may_set_their_rates() -> None:
    one = tiny_ladder()
    assert [rung.name for rung in one.rungs] == ["1x32@0.03", "2x32@0.03", "1x32@0.06"]
    short, deep, long = (rung.study for rung in one.rungs)
    assert long.arms[0].config.train.steps == 2 * short.arms[0].config.train.steps
    assert differences(short.arms[0].config.model, deep.arms[0].config.model) == {"n_layers": (1, 2)}
    assert differences(deep.arms[0].config, deep.arms[1].config).keys() >= {"model.query.kind", "train.lr"}
    assert len({study.name for study in (short, deep, long)}) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"baseline": "base"}, "its baseline 'base' is no arm; did you mean 'baseline'"),
        ({"tokens_per_parameter": 1e-4}, r"rung 1x32@0.0001: .* lower train.tokens_per_step, or train longer"),
        ({"lengths": (0.06, 0.06)}, "it needs rungs, each once"),
    ],
)
def test_ladders_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        tiny_ladder(**change)


def test_widths_are_filled_by_heads_of_32() -> None:
    with pytest.raises(BadInput, match="multiples of 32, its narrowest heads, and 80 is none"):
        at_size(tiny(), 2, 80)


def test_a_length_is_a_schedule_of_its_own() -> None:
    paper = presets.get("paper/baseline")
    config = at_length(paper, 491_520 * 6_000)
    assert (config.train.steps, config.train.warmup_steps, config.train.horizon, config.eval.every) == (
        6000,
        200,
        None,
        100,
    )


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_ladders_are_the_papers_arms(name: str) -> None:
    one = load_definition(name)
    assert {rung.study.baseline for rung in one.rungs} == {"baseline"}
    for rung in one.rungs:
        base, wide, nonlinear = (count(arm.config.model).non_embedding for arm in rung.study.arms)
        assert wide / base == pytest.approx(1.125, abs=2e-3)
        assert nonlinear / base == pytest.approx(1, abs=0.01)
        assert rung.study.arms[0].config.train.steps >= 100
    at_own_size = {"small": "small", "paper": "paper"}[name]
    base = presets.get(f"{at_own_size}/baseline")
    ratio = one.rungs[0].study.arms[2].config.train.lr / one.rungs[0].study.arms[0].config.train.lr
    best = presets.get({"small": "small/res-gelu", "paper": "paper/res-gelu-best"}[name])
    assert ratio == pytest.approx(best.train.lr / base.train.lr)


@pytest.mark.parametrize("preset", ["paper/res-gelu-best", "paper/mlp-4.75", "small/res-gelu"])
def test_an_arm_like_a_preset_is_that_preset_at_its_own_size(preset: str) -> None:
    reference = f"{preset.partition('/')[0]}/baseline"
    made, wanted = like(preset, reference)(presets.get(reference)), presets.get(preset)
    assert made.model == wanted.model
    assert (made.train.lr, made.train.min_lr) == pytest.approx((wanted.train.lr, wanted.train.min_lr))


def test_the_papers_ladder_has_gpt_3s_rates() -> None:
    one = load_definition("paper")
    rates = {rung.d_model: rung.study.arms[0].config.train.lr for rung in one.rungs}
    assert rates == {768: 6e-4, 1024: 3e-4, 1536: 2.5e-4, 2048: 2e-4}
    assert [rung.n_layers for rung in one.rungs[:4]] == [12, 24, 24, 24]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no file"),
        ("LADDER = 3", "does not expose a qurve Ladder as LADDER"),
        ("1 / 0", "cannot be run: ZeroDivisionError"),
    ],
)
def test_files_that_are_no_ladders_are_refused(text: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(BadInput, match=message):
        load_definition(str(file))
    with pytest.raises(BadInput, match="no ladder 'smal'; did you mean 'small'"):
        load_definition("smal")


# --------------------------------------------------------------------------------------------------------------- making


@pytest.fixture(scope="module")
def made(data: TokenData, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LadderResults]:
    """A finished ladder of three rungs, two arms and two seeds. Tests only read it."""
    folder = tmp_path_factory.mktemp("ladder") / "made"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "ProcessPoolExecutor", InProcess)
        results, failed = run_ladder(
            tiny_ladder(), folder, data, command="qurve study ladder", say=lambda text: None, workers=1
        )
    assert failed == {}
    return folder, results


def test_a_ladder_leaves_its_rungs_and_what_was_measured(made: tuple[Path, LadderResults], data: TokenData) -> None:
    folder, results = made
    assert sorted(path.name for path in folder.iterdir()) == [FILE, "rungs"]
    assert load_ladder(folder) == load_ladder(folder / FILE) == results
    assert [rung.name for rung in results.rungs] == ["1x32@0.03", "2x32@0.03", "1x32@0.06"]
    for rung in results.rungs:
        assert all(len(arm.losses) == 2 and not arm.unfinished for arm in rung.arms.values())
        assert rung.epochs == rung.tokens / len(data.split("train"))
        assert rung.machine["torch"]
    assert results.data_fingerprint == data.fingerprint
    tree = json.loads((folder / FILE).read_text())
    assert tree["findings"]["gain_percent"]["2x32@0.03"]["res-gelu"]["n"] == 2
    assert {one["along"] for one in tree["findings"]["series"]} == {"size", "length"}
    told = [line for line in lines(results) if ", loss along " in line]
    assert all(("A / D^alpha over 2 lengths" in line) == (", loss along length" in line) for line in told)
    assert all(("A / N^alpha over 2 sizes" in line) == (", loss along size" in line) for line in told)


def test_the_same_call_goes_on_and_keeps_what_is_made(
    made: tuple[Path, LadderResults], data: TokenData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "ProcessPoolExecutor", InProcess)
    folder = Path(shutil.copytree(made[0], tmp_path / "again"))
    shutil.rmtree(folder / "rungs" / "2x32@0.03" / "runs" / "res-gelu" / "seed-2")
    (folder / FILE).unlink()
    kept = snapshot(folder / "rungs" / "1x32@0.03" / "runs")
    results, failed = run_ladder(tiny_ladder(), folder, data, command="again", say=lambda text: None, workers=1)
    assert failed == {}
    measured_again = {"tokens_per_s": None, "peak_memory_bytes": None}
    again, before = (
        [{name: dataclasses.replace(arm, **measured_again) for name, arm in rung.arms.items()} for rung in one.rungs]
        for one in (results, made[1])
    )
    assert again == before
    assert snapshot(folder / "rungs" / "1x32@0.03" / "runs") == kept


def test_until_its_last_rung_is_begun_a_ladder_says_so_and_decides_nothing(
    data: TokenData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "ProcessPoolExecutor", InProcess)
    made: list[Any] = []

    def cut_short(*arguments: Any, **options: Any) -> dict[str, str]:
        if made:
            raise KeyboardInterrupt
        made.append(arguments)
        return run_study(*arguments, **options)

    monkeypatch.setattr("qurve.study.ladder.run_study", cut_short)
    with pytest.raises(KeyboardInterrupt):
        run_ladder(tiny_ladder(seeds=(1,)), tmp_path, data, command="", say=lambda text: None, workers=1)
    results = load_ladder(tmp_path)
    assert [rung.name for rung in results.rungs] == ["1x32@0.03"]
    assert results.not_begun == ("2x32@0.03", "1x32@0.06")
    assert "Not begun: 2x32@0.03, 1x32@0.06." in lines(results)


def test_rungs_that_were_planned_and_not_begun_were_not_seen(
    made: tuple[Path, LadderResults], data: TokenData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qurve.study.ladder.run_study", lambda *_, **__: {})
    folder = Path(shutil.copytree(made[0], tmp_path / "again"))
    whole = tiny_ladder()
    first = whole.rungs[0].name
    for rung in whole.rungs[1:]:
        shutil.rmtree(folder / "rungs" / rung.name)

    def run(wanted: Any) -> LadderResults:
        return run_ladder(wanted, folder, data, command="", say=lambda text: None)[0]

    assert run(whole).not_begun
    assert run(tiny_ladder(lengths=())).earlier_rungs == ((first,),)


def test_rungs_that_are_added_or_dropped_after_a_look_are_remembered_and_take_the_verdict(
    made: tuple[Path, LadderResults], data: TokenData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rung's own study is not what is tested here: none is made."""
    monkeypatch.setattr("qurve.study.ladder.run_study", lambda *_, **__: {})
    folder = Path(shutil.copytree(made[0], tmp_path / "again"))
    whole = tiny_ladder()
    short, deep, long = (rung.name for rung in whole.rungs)

    def run(wanted: Any) -> LadderResults:
        return run_ladder(wanted, folder, data, command="", say=lambda text: None)[0]

    assert run(whole).earlier_rungs == ()
    assert run(dataclasses.replace(whole, rungs=whole.rungs[::-1])).earlier_rungs == ()
    assert not any("other rungs" in doubt for doubt in doubts(made[1]))
    fewer = run(tiny_ladder(lengths=()))
    assert fewer.earlier_rungs == ((long, deep, short),)
    assert doubts(fewer)[0].startswith(f"This ladder was run before with other rungs ({long}, {deep}, {short}).")
    (sizes,) = series(fewer)
    assert (
        undecided(fewer, sizes, "res-gelu")
        == f"no verdict: it was run before with other rungs ({long}, {deep}, {short})"
    )
    assert load_ladder(folder).earlier_rungs == fewer.earlier_rungs
    longer = run(tiny_ladder(lengths=(0.06, 0.09)))
    assert longer.earlier_rungs == ((long, deep, short), (short, deep))
    assert longer.not_begun == ("1x32@0.09",)
    assert "no verdict: it was run before" in (undecided(longer, series(longer)[0], "res-gelu") or "")

    (folder / FILE).unlink()  # the rungs that lie there tell of one that was dropped
    assert run(tiny_ladder(lengths=())).earlier_rungs == ((short, long, deep),)
    assert run(tiny_ladder(lengths=())).earlier_rungs == ((short, long, deep),)


def test_a_ladder_that_grows_before_it_could_say_anything_is_let_be() -> None:
    results = LadderResults("x", "X", "", "baseline", "f", (), ("a", "b", "c"), (("a", "b"),))
    assert other_rungs(results) is None
    assert len(doubts(results)) == 1
    for earlier in (("a", "d"), ("a", "b", "c", "d")):
        assert other_rungs(dataclasses.replace(results, earlier_rungs=(earlier,))) == ", ".join(earlier)


def test_another_ladders_folder_is_refused(made: tuple[Path, LadderResults], data: TokenData, tmp_path: Path) -> None:
    other = dataclasses.replace(tiny_ladder(), name="other")
    with pytest.raises(BadInput, match="holds the ladder 'tiny'; give another --out"):
        run_ladder(other, made[0], data, command="", say=lambda text: None)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(BadInput, match="something that is not a ladder"):
        run_ladder(other, tmp_path, data, command="", say=lambda text: None)


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 1}'])
def test_a_damaged_ladder_is_written_anew_by_the_call_that_its_message_names(
    content: str, made: tuple[Path, LadderResults], data: TokenData, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(made[0], tmp_path / "ladder"))
    (folder / FILE).write_text(content)
    with pytest.raises(BadInput, match="restore it, or repeat the `qurve study ladder` that wrote it"):
        load_ladder(folder)
    other = dataclasses.replace(tiny_ladder(), rungs=tiny_ladder().rungs[:1])
    with pytest.raises(BadInput, match=r"ladder\.json is damaged, and .* no rung of the ladder 'tiny'; give another"):
        run_ladder(other, folder, data, command="", say=lambda text: None)
    found, failed = run_ladder(tiny_ladder(), folder, data, command="", say=lambda text: None, workers=1)
    assert (found.rungs, failed) == (made[1].rungs, {})


def test_a_folder_in_the_place_of_a_ladders_file_is_refused(data: TokenData, tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with pytest.raises(BadInput, match=r"ladder\.json is a folder; remove it, or give another --out"):
        run_ladder(tiny_ladder(), tmp_path, data, command="", say=lambda text: None)


def test_a_rung_that_cannot_be_trained_is_refused_before_any_is(data: TokenData, tmp_path: Path) -> None:
    def bad(config: RunConfig) -> RunConfig:
        return apply_settings(
            config, ["model.qk_norm=true", *(["train.micro_batch=3"] if config.model.n_layers == 2 else [])]
        )

    one = ladder("l", "L", tiny(), SIZES, ARMS | {"bad": bad}, tokens_per_parameter=0.03)
    with pytest.raises(BadInput, match="does not divide the step's 4 sequences"):
        run_ladder(one, tmp_path / "out", data, command="", say=lambda text: None)
    assert not (tmp_path / "out").exists()


def test_the_command_makes_a_ladder_and_says_what_came_out(
    data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "ProcessPoolExecutor", InProcess)
    file = tmp_path / "mine.py"
    file.write_text(
        "from qurve.config import apply_settings\nfrom qurve.study.ladder import ladder\nfrom tiny import tiny\n"
        "arms = {'baseline': lambda c: c, 'other': lambda c: apply_settings(c, ['model.qk_norm=true'])}\n"
        "LADDER = ladder('mine', 'Mine', tiny(), [(1, 32), (2, 32)], arms, tokens_per_parameter=0.03, seeds=(1,))\n"
    )
    done = call("study", "ladder", file, "--out", tmp_path / "out", "--data", data_folder, "--workers", 1, "--json")
    assert done.code == 0, done.err
    assert [rung["name"] for rung in done.json["rungs"]] == ["1x32@0.03", "2x32@0.03"]
    told = words(done.err)
    assert "other, gain along size (0.03 tokens per parameter): no verdict: it takes 3 rungs, and there are 2; " in told
    assert "Published over parameters: 0.076 (Kaplan et al. 2020" in told
    made = load_ladder(tmp_path / "out")
    assert made.name == "mine"
    copy = tmp_path / "out" / "definition" / "mine.py"
    assert copy.read_bytes() == file.read_bytes()
    assert made.definition == {"definition/mine.py": hashlib.sha256(file.read_bytes()).hexdigest()}
    kept = f"# definition/mine.py in the ladder's folder, sha256 {made.definition['definition/mine.py']}"
    for report in ("report.html", "report.md"):
        assert kept in html.unescape((tmp_path / "out" / "report" / report).read_text(encoding="utf-8"))

    file.unlink()  # whoever has the folder alone can make it again, in the same place
    again = call("study", "ladder", copy, "--out", tmp_path / "out", "--data", data_folder, "--workers", 1, "--json")
    assert again.code == 0, again.err
    assert again.json["definition"] == made.definition
    assert "2 of 2 runs are made already and kept" in words(again.err)


def test_a_ladder_takes_a_pool_and_settings(data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "ProcessPoolExecutor", InProcess)
    file = tmp_path / "mine.py"
    file.write_text(
        "from qurve.study.ladder import ladder\nfrom tiny import tiny\n"
        "arms = {'baseline': lambda c: c}\n"
        "LADDER = ladder('mine', 'Mine', tiny(), [(1, 32)], arms, tokens_per_parameter=0.03, seeds=(1,))\n"
    )
    options = ("--data", data_folder, "--workers", 1, "--pool", tmp_path / "pool", "--set", "train.lr=0.02")
    for out in ("one", "two"):
        done = call("study", "ladder", file, "--out", tmp_path / out, *options)
        assert done.code == 0, done.err
    assert "1 of 1 runs are made already and kept" in words(done.out)
    (run,) = (tmp_path / "pool").iterdir()
    assert RunFolder(run).config_json()[0]["train"]["lr"] == 0.02
    for setting in ("train.steps=3", "model.d_model=64", "model={}"):
        refused = call("study", "ladder", file, "--out", tmp_path / "three", "--set", setting)
        assert refused.code == 2
        assert "the ladder mine gives it to each rung" in words(refused.err)
    assert not (tmp_path / "three").exists()
