"""The ladder: each rung is a full schedule at its size, it goes on where it was cut short, and its file says it all."""

from __future__ import annotations

import csv
import dataclasses
import html
import json
import math
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from fake_study import write_study
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
from qurve.study.effects import Unknown
from qurve.study.ladder import BUILT_IN, at_length, at_size, ladder, load_definition, run_ladder
from qurve.study.ladder_results import (
    FILE,
    JUDGED,
    LadderResults,
    RungArm,
    RungResults,
    equivalent_gain,
    fit,
    gain,
    gain_trend,
    lines,
    load_ladder,
    measured,
    percent,
    series,
    to_json,
)
from qurve.study.ladder_tables import costs_table, rungs_table
from qurve.study.markdown import escaped
from qurve.study.report import write_report
from qurve.study.scaling import Equivalent, Estimate, Fit, Trend
from qurve.study.tables import NONE
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


def test_another_ladders_folder_is_refused(made: tuple[Path, LadderResults], data: TokenData, tmp_path: Path) -> None:
    other = dataclasses.replace(tiny_ladder(), name="other")
    with pytest.raises(BadInput, match="holds the ladder 'tiny'; give another --out"):
        run_ladder(other, made[0], data, command="", say=lambda text: None)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(BadInput, match="something that is not a ladder"):
        run_ladder(other, tmp_path, data, command="", say=lambda text: None)


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
    assert "other, gain along size (0.03 tokens per parameter): not known: " in told
    assert "Published over parameters: 0.076 (Kaplan et al. 2020" in told
    assert load_ladder(tmp_path / "out").name == "mine"


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


# ------------------------------------------------------------------------------------------------ what it says, planted


def planted(alpha: float = 0.1, worth: tuple[float, ...] = (1.4, 1.4, 1.4), noise: float = 1e-4) -> LadderResults:
    """Losses `10 N^-alpha` at a fixed number of tokens per parameter; the arm's are those of a baseline `worth` times
    as large. The seeds scatter alike in both, and by `noise` of their own."""
    rungs = []
    for place, (size, factor) in enumerate(zip((100_000, 200_000, 400_000), worth, strict=True), 1):
        wobbles = {seed: 1 + 0.01 * math.sin(seed + place) for seed in (1, 2, 3)}
        own = {seed: 1 + noise * math.sin(7 * seed + 3 * place) for seed in (1, 2, 3)}
        base = {seed: 10 * size**-alpha * wobbles[seed] for seed in (1, 2, 3)}
        arm = {seed: 10 * (factor * size) ** -alpha * wobbles[seed] * own[seed] for seed in (1, 2, 3)}
        arms = {
            name: RungArm(name, name.title(), size, size + 5000, 6.0 * size, losses)
            for name, losses in (("baseline", base), ("new", arm))
        }
        rungs.append(RungResults(f"{place}x32@20", place, 32, 20.0, 20 * size, 0.5, arms, {}))
    return LadderResults("planted", "Planted", "command", "baseline", "f" * 64, tuple(rungs))


def test_its_page_says_what_its_rungs_say(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(to_json(planted(worth=(1.2, 1.4, 1.7))))
    source = write_report(tmp_path).read_text(encoding="utf-8")
    told = " ".join(html.unescape(re.sub(r"<(style|svg)\b.*?</\1>|<[^>]*>", " ", source, flags=re.DOTALL)).split())
    results = load_ladder(tmp_path)
    for line in lines(results):
        assert line in told
    for rung in results.rungs:
        assert percent(gain(results, rung, "new")).partition(" [")[0] in told
    assert "Along size, 20 tokens per parameter" in told
    for name in ("gain-1", "loss-1"):
        figure = re.search(rf'<figure id="{name}".*?</figure>', source, flags=re.DOTALL)
        assert figure is not None
        assert figure[0].count("<svg") == 2
    assert "<script" not in source
    assert "script-src 'none'" in source
    done = call("report", tmp_path, "--json")
    assert done.code == 0
    assert done.json["name"] == "planted"


def test_what_was_planted_is_read_off() -> None:
    results = planted()
    (sizes,) = series(results)
    assert (sizes.along, sizes.fixed) == ("size", "20 tokens per parameter")
    fitted, slope = fit(sizes, "baseline"), gain_trend(results, sizes, "new")
    assert isinstance(fitted, Fit)
    assert fitted.alpha.value == pytest.approx(0.1, abs=0.01)
    assert isinstance(slope, Trend)
    assert slope.outcome == "no change told"
    for rung in results.rungs:
        found = gain(results, rung, "new")
        assert isinstance(found, Estimate)
        assert found.value == pytest.approx(100 * (1 - 1.4**-0.1), abs=0.02)


def test_a_gain_is_worth_what_was_planted_in_parameters_and_its_square_in_compute() -> None:
    """Tokens grow with the parameters, so that twice the size is four times the compute."""
    results = planted(noise=0.0)
    flat = [
        dataclasses.replace(
            rung,
            arms={
                name: dataclasses.replace(arm, losses={1: arm.losses[1] / (1 + 0.01 * math.sin(1 + place))})
                for name, arm in rung.arms.items()
            },
        )
        for place, rung in enumerate(results.rungs, 1)
    ]
    results = dataclasses.replace(results, rungs=tuple(flat))
    for rung in results.rungs:  # the largest by the next smaller one
        parameters, compute = (equivalent_gain(results, rung, "new", what) for what in ("params", "flops"))
        assert isinstance(parameters, Equivalent)
        assert isinstance(compute, Equivalent)
        assert parameters.percent.value == pytest.approx(40)
        assert compute.percent.value == pytest.approx(100 * (1.4**2 - 1))


@pytest.mark.parametrize(("worth", "outcome"), [((1.2, 1.4, 1.6), "grows"), ((1.6, 1.4, 1.2), "shrinks")])
def test_a_gain_that_changes_with_size_is_told(worth: tuple[float, ...], outcome: str) -> None:
    results = planted(worth=worth)
    slope = gain_trend(results, series(results)[0], "new")
    assert isinstance(slope, Trend)
    assert slope.outcome == outcome
    assert any(
        line.startswith(f"New, gain along size (20 tokens per parameter): {outcome}: ") for line in lines(results)
    )


def with_nulls(seed: int, arms: int = 20) -> LadderResults:
    """Arms that are the baseline but for noise, at three sizes with three seeds."""
    draw = random.Random(seed)
    rungs = []
    for rung in planted().rungs:
        base = rung.arms["baseline"]
        nulls = {
            f"v{i}": dataclasses.replace(
                base, name=f"v{i}", label=f"V{i}", losses={s: x + draw.gauss(0, 0.01) for s, x in base.losses.items()}
            )
            for i in range(arms)
        }
        rungs.append(dataclasses.replace(rung, arms={"baseline": base, **nulls}))
    return dataclasses.replace(planted(), rungs=tuple(rungs))


def test_of_many_arms_without_a_change_none_is_said_to_change() -> None:
    """Each slope's own interval leaves out zero once in twenty arms: one claim a ladder."""
    own, claimed = 0, 0
    for seed in range(20):
        results = with_nulls(seed)
        (sizes,) = series(results)
        trends = [gain_trend(results, sizes, arm) for arm in results.arms if arm != "baseline"]
        slopes = [found for found in trends if isinstance(found, Trend)]
        assert len(slopes) == 20
        own += sum(found.per_doubling.low > 0 or found.per_doubling.high < 0 for found in slopes)
        claimed += any(found.outcome in ("grows", "shrinks") for found in slopes)
        for found in slopes:
            assert (found.p < 0.05) == (found.per_doubling.low > 0 or found.per_doubling.high < 0)
            assert found.p <= found.p_holm
    assert own > 10
    assert claimed <= 3
    said = lines(results)
    assert JUDGED in said
    assert all(" after Holm for 20 arms." in line for line in said if ", gain along " in line)


def test_cost_stands_beside_the_gain(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "rung", search=False, seeds=(1, 2))
    for name, factor in (("baseline", 1), ("mlp-4.75", 2)):
        for seed in (1, 2):
            file = folder / "runs" / name / f"seed-{seed}" / "environment.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {"peak_memory_bytes": factor * 2**30}))
    rung = measured(folder, "4x128@20", (4, 128), 20.0, 10**6)
    results = LadderResults("x", "X", "command", "baseline", "f" * 64, (rung,))
    assert rung.arms["baseline"].tokens_per_s == pytest.approx(2048 / 0.1 / 1.015, rel=1e-3)
    rows = {row[1]: row[2:] for row in costs_table(results).rows}
    assert rows["Baseline"] == ["ref.", "4.80", rows["Baseline"][2], "1,024 MiB"]
    assert rows["MLP 4.75"][1:] == ["5.40 (+12.5 %)", f"{rows['Baseline'][2]} (0.0 %)", "2,048 MiB (+100.0 %)"]
    assert rows["MLP 4.75"][0] == percent(gain(results, rung, "mlp-4.75"))
    (tmp_path / FILE).write_text(to_json(results))
    assert load_ladder(tmp_path) == results
    busy = dataclasses.replace(results, rungs=(dataclasses.replace(rung, speeds_apart=2.0),))
    assert "4x128@20 (2.0 times): no speed is compared there." in " ".join(costs_table(busy).notes)
    assert costs_table(busy).rows[1][4] == costs_table(busy).rows[0][4]


def test_a_ladder_from_before_costs_were_kept_is_read(tmp_path: Path) -> None:
    tree = json.loads(to_json(planted()))
    for rung in tree["rungs"]:
        del rung["speeds_apart"]
        for arm in rung["arms"].values():
            del arm["tokens_per_s"], arm["peak_memory_bytes"]
    (tmp_path / FILE).write_text(json.dumps(tree))
    assert load_ladder(tmp_path) == planted()


def test_every_dash_has_its_reason_and_every_format_its_numbers(tmp_path: Path) -> None:
    results = planted()
    broken = dataclasses.replace(results.rungs[1].arms["new"], losses={}, doubt="new: seed 2 diverged")
    rung = dataclasses.replace(results.rungs[1], arms=results.rungs[1].arms | {"new": broken})
    results = dataclasses.replace(results, rungs=(results.rungs[0], rung, results.rungs[2]))
    table = rungs_table(results)
    (dashed,) = [row for row in table.rows if NONE in row]
    assert dashed[:2] == ["2x32@20", "New"]
    assert dashed.count(NONE) == 4
    reasons = [note for note in table.notes if note.startswith(NONE)]
    assert reasons == [f"{NONE} 2x32@20, New, loss; 2x32@20, New, ΔLL; 2x32@20, New, worth: new: seed 2 diverged."]
    assert "Rung 2x32@20, New: no gain (new: seed 2 diverged)." in lines(results)

    (tmp_path / FILE).write_text(to_json(results))
    report = write_report(tmp_path).parent
    assert {file.name for file in report.iterdir()} == {"report.html", "report.md", "table.csv", "table.tex"}
    text = (report / "report.md").read_text(encoding="utf-8")
    for line in (*lines(results), *reasons):
        assert f"- {escaped(line)}\n" in text
    for found in (rungs_table(results), costs_table(results)):
        for row in found.rows:
            assert f"| {' | '.join(map(escaped, row))} |" in text
    rows = list(csv.DictReader((report / "table.csv").read_text(encoding="utf-8").splitlines()))
    assert [row["rung"] for row in rows] == [rung.name for rung in results.rungs for _ in rung.arms]
    assert float(rows[1]["dll_percent"]) == gain(results, results.rungs[0], "new").value
    assert (rows[3]["loss"], rows[3]["dll_percent"], rows[0]["dll_low"]) == ("", "", "")
    tex = (report / "table.tex").read_text(encoding="utf-8")
    assert tex.count(r"\\") == 1 + len(table.rows)
    assert r"$+" not in tex
    assert "2x32@20 & New" in tex


def test_a_rung_that_is_no_comparison_makes_the_slope_unknown_and_is_named() -> None:
    results = planted()
    arm = results.rungs[1].arms["new"]
    broken = dataclasses.replace(arm, doubt="new: seed 2 diverged", unfinished=("seed 2 diverged (after step 9)",))
    rung = dataclasses.replace(results.rungs[1], arms=results.rungs[1].arms | {"new": broken}, epochs=3.0)
    results = dataclasses.replace(results, rungs=(results.rungs[0], rung, results.rungs[2]))
    (sizes,) = series(results)
    assert gain_trend(results, sizes, "new") == fit(sizes, "new") == Unknown("new: seed 2 diverged")
    assert isinstance(fit(sizes, "baseline"), Fit)
    said = lines(results)
    assert "New, gain along size (20 tokens per parameter): no slope (new: seed 2 diverged)." in said
    assert "Rung 2x32@20, New: seed 2 diverged (after step 9)." in said
    assert "Rung 2x32@20 went through the training data 3.0 times." in said


# ------------------------------------------------------------------------------------------------------------ damaged


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tree: tree.pop("rungs"), "the field 'rungs' is missing"),
        (lambda tree: tree.update(format=2), "not a ladder of format 1"),
        (lambda tree: tree["rungs"][0]["arms"].pop("baseline"), "a rung lacks the baseline 'baseline'"),
        (lambda tree: tree["rungs"][0]["arms"]["new"]["losses"].update({"1": -1}), "no number above zero"),
        (lambda tree: tree["rungs"][0].update(tokens="many"), "invalid literal"),
        (lambda tree: tree.update(rungs=7), "not iterable"),
    ],
)
def test_a_damaged_file_is_refused_by_name(damage: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / FILE
    tree = json.loads(to_json(planted()))
    file.write_text(json.dumps(tree))
    assert load_ladder(tmp_path) == planted()
    damage(tree)
    file.write_text(json.dumps(tree))
    with pytest.raises(BadInput, match=rf"{FILE} is damaged: .*{message}"):
        load_ladder(tmp_path)


def test_what_is_no_ladder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is no ladder: it has no ladder"):
        load_ladder(tmp_path)
