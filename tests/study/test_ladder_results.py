"""What a ladder's file says: gains, fits and slopes of planted losses, in every format, and damaged files refused."""

from __future__ import annotations

import csv
import dataclasses
import html
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
from fake_study import BASELINE, WIDER, write_study

from commands import call
from qurve.errors import BadInput
from qurve.study.doubts import UNTUNED
from qurve.study.effects import Unknown
from qurve.study.ladder_results import (
    FILE,
    LadderResults,
    RungArm,
    RungResults,
    doubts,
    equivalent_gain,
    fit,
    gain,
    gain_trend,
    load_ladder,
    measured,
    rung_tests,
    series,
    to_json,
)
from qurve.study.ladder_tables import JUDGED, costs_table, lines, percent, rungs_table
from qurve.study.markdown import escaped
from qurve.study.paired import holm, paired_interval, paired_p
from qurve.study.report import write_report
from qurve.study.scaling import Equivalent, Estimate, Fit, Trend
from qurve.study.tables import NONE


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
    verdict = source.partition('id="verdict"')[2].partition("</section>")[0]
    top = [html.unescape(words) for words in re.findall("<li>(.*?)</li>", verdict)]
    assert top == [line for line in lines(results) if line.startswith("New, gain along size") or line == JUDGED]
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


def at(results: LadderResults, place: int, seeds: dict[int, int], times: float = 1.0) -> LadderResults:
    """With other seeds' names, and losses so many times as high, at one rung."""
    rung = results.rungs[place]
    arms = {
        name: dataclasses.replace(arm, losses={seeds.get(s, s): times * loss for s, loss in arm.losses.items()})
        for name, arm in rung.arms.items()
    }
    rungs = [dataclasses.replace(rung, arms=arms) if i == place else one for i, one in enumerate(results.rungs)]
    return dataclasses.replace(results, rungs=tuple(rungs))


@pytest.mark.parametrize(("place", "far"), [(0, 2), (2, 0)])
def test_a_gain_is_worth_what_the_nearest_size_says(place: int, far: int) -> None:
    """The next larger one, for the largest the next smaller one; those beyond it are not asked."""
    results = planted(noise=0.0)
    found, other = (
        equivalent_gain(one, one.rungs[place], "new", "params") for one in (results, at(results, far, {}, times=1.2))
    )
    assert isinstance(found, Equivalent)
    assert other == found


def test_rungs_of_other_seeds_are_no_measure_of_each_other() -> None:
    results = at(planted(), 1, {3: 4})
    found = equivalent_gain(results, results.rungs[0], "new", "params")
    assert found == Unknown("rung 2x32@20 has other seeds finished than 1x32@20")


@pytest.mark.parametrize(("worth", "outcome"), [((1.2, 1.4, 1.6), "grows"), ((1.6, 1.4, 1.2), "shrinks")])
def test_a_gain_that_changes_with_size_is_told(worth: tuple[float, ...], outcome: str) -> None:
    results = planted(worth=worth)
    slope = gain_trend(results, series(results)[0], "new")
    assert isinstance(slope, Trend)
    assert slope.outcome == outcome
    assert any(
        line.startswith(f"New, gain along size (20 tokens per parameter): {outcome}: ") for line in lines(results)
    )


def fewer(results: LadderResults, place: int, *seeds: int) -> LadderResults:
    """Without the other seeds at one rung."""
    rung = results.rungs[place]
    arms = {n: dataclasses.replace(a, losses={s: a.losses[s] for s in seeds}) for n, a in rung.arms.items()}
    rungs = [dataclasses.replace(rung, arms=arms) if i == place else one for i, one in enumerate(results.rungs)]
    return dataclasses.replace(results, rungs=tuple(rungs))


@pytest.mark.parametrize("case", ["one seed a rung", "two seeds at one rung", "a rung not begun"])
def test_a_slope_without_enough_seeds_or_before_the_last_rung_decides_nothing(case: str) -> None:
    """However clear: the same losses, whole, are a gain that grows."""
    whole = planted(worth=(1.2, 1.4, 1.6))
    results = {
        "one seed a rung": fewer(fewer(fewer(whole, 0, 2), 1, 2), 2, 2),
        "two seeds at one rung": fewer(whole, 1, 1, 3),
        "a rung not begun": dataclasses.replace(whole, not_begun=("4x32@20",)),
    }[case]
    (sizes,) = series(results)
    slope = gain_trend(results, sizes, "new")
    assert isinstance(slope, Trend)
    assert (slope.p, slope.p_holm, slope.outcome) == (None, None, "not known")
    why = {
        "one seed a rung": "no verdict: it takes 3 seeds at each rung, and there are 1 at 1x32@20, 1 at 2x32@20, 1 at",
        "two seeds at one rung": "no verdict: it takes 3 seeds at each rung, and there are 2 at 2x32@20;",
        "a rung not begun": "no verdict yet: 4x32@20 not begun;",
    }[case]
    (line,) = [line for line in lines(results) if line.startswith("New, gain along size")]
    assert line.startswith(f"New, gain along size (20 tokens per parameter): {why}")
    assert "grows" not in line
    assert "percentage points per doubling" in line
    assert ("Not begun: 4x32@20." in lines(results)) == (case == "a rung not begun")


@pytest.mark.parametrize("fate", ["stopped", "running", "missing", "failed", "diverged"])
def test_a_rung_with_a_run_that_is_not_finished_has_no_gain_and_its_series_no_slope(fate: str, tmp_path: Path) -> None:
    rungs = []
    for place, fates in enumerate(({}, {("mlp-4.75", 4): fate})):
        folder = write_study(tmp_path / str(place), (BASELINE, WIDER), seeds=(1, 2, 3, 4), search=False, fates=fates)
        rung = measured(folder, f"{place}x128@20", (place, 128), 20.0, 10**6)
        arms = {n: dataclasses.replace(a, non_embedding=(1 + place) * a.non_embedding) for n, a in rung.arms.items()}
        rungs.append(dataclasses.replace(rung, arms=arms))
    results = LadderResults("x", "X", "command", "baseline", "f" * 64, tuple(rungs))
    (sizes,) = series(results)
    assert isinstance(gain(results, rungs[0], "mlp-4.75"), Estimate)
    for found in (gain(results, rungs[1], "mlp-4.75"), gain_trend(results, sizes, "mlp-4.75")):
        assert isinstance(found, Unknown)
        assert found.why.startswith("no verdict")
        assert "seed 4" in found.why


def growing(**fields: Any) -> tuple[Trend, str, LadderResults]:
    """A gain that grows (p about 0.01), with these fields at its second rung."""
    whole = planted(worth=(1.2, 1.4, 1.6))
    rungs = [dataclasses.replace(rung, **fields) if place == 1 else rung for place, rung in enumerate(whole.rungs)]
    results = dataclasses.replace(whole, rungs=tuple(rungs))
    (sizes,) = series(results)
    slope = gain_trend(results, sizes, "new")
    assert isinstance(slope, Trend)
    (line,) = [line for line in lines(results) if line.startswith("New, gain along size")]
    return slope, line, results


def test_declared_looks_share_the_risk_of_a_slope() -> None:
    alone, line, _ = growing()
    assert alone.outcome == "grows"
    assert "looks" not in line
    twice, line, _ = growing(looks=2)
    assert twice.p_holm == pytest.approx(2 * alone.p_holm)
    assert line.endswith(", times 2 declared looks.")
    assert growing(looks=40)[0].outcome == "no change told"


def test_arms_that_a_rung_was_compared_with_before_are_of_the_slopes_family() -> None:
    alone, picked, line = growing()[0], *growing(compared_before=9)[:2]
    assert picked.p_holm == pytest.approx(10 * alone.p_holm)
    assert "after Holm for 10 arms, 9 of them compared with it before" in line


def test_a_rungs_doubts_are_the_ladders(tmp_path: Path) -> None:
    rungs = []
    for place, more in enumerate(
        ({"earlier_seeds": [[1]]}, {"compared_in_pool": {"own": ["a", "b"]}, "looks": [3, 5]}), 1
    ):
        folder = write_study(tmp_path / str(place), (BASELINE, WIDER), search=False)
        file = folder / "study.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | more))
        rungs.append(measured(folder, f"{place}x128@20", (place, 128), 20.0, 10**6))
    assert [(rung.compared_before, rung.looks) for rung in rungs] == [(0, 0), (2, 2)]
    results = LadderResults("x", "X", "command", "baseline", "f" * 64, tuple(rungs))
    earlier, untuned, before = doubts(results)
    assert untuned == f"Rungs 1x128@20, 2x128@20: {UNTUNED}"
    assert earlier.startswith("Rung 1x128@20: This study was run before with other seeds (1).")
    assert before.startswith("Rung 2x128@20: 2 other arms were compared with this baseline before")
    (tmp_path / FILE).write_text(to_json(results))
    assert json.loads((tmp_path / FILE).read_text())["doubts"] == doubts(results)
    assert load_ladder(tmp_path) == results
    page = html.unescape(write_report(tmp_path).read_text(encoding="utf-8"))
    told = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    for doubt in doubts(results):
        assert f"<li>{doubt}</li>" in page
        assert f"- {escaped(doubt)}" in told
    said = call("report", tmp_path)
    assert "Before you believe it:" in said.out
    assert "- Rung 1x128@20: This study was run before" in " ".join(said.out.split())


def test_a_run_that_is_not_finished_is_told_of_once(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "rung", (BASELINE, WIDER), search=False, fates={("mlp-4.75", 2): "diverged"})
    results = LadderResults("x", "X", "", "baseline", "f", (measured(folder, "r", (4, 128), 20.0, 10**6),))
    assert len([line for line in (*lines(results), *doubts(results)) if "MLP 4.75: seed 2 diverged" in line]) == 1
    older = dataclasses.replace(results, rungs=(dataclasses.replace(results.rungs[0], doubts=()),))
    assert any(line.startswith("Rung r, MLP 4.75: seed 2 diverged") for line in lines(older))


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


def test_a_ladder_from_before_costs_and_rungs_to_come_were_kept_is_read(tmp_path: Path) -> None:
    tree = json.loads(to_json(planted()))
    del tree["not_begun"], tree["earlier_rungs"], tree["doubts"]
    for rung in tree["rungs"]:
        del rung["speeds_apart"], rung["doubts"], rung["compared_before"], rung["looks"]
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
    rung = dataclasses.replace(results.rungs[1], arms=results.rungs[1].arms | {"new": broken}, epochs=1.5)
    results = dataclasses.replace(results, rungs=(results.rungs[0], rung, results.rungs[2]))
    (sizes,) = series(results)
    assert gain_trend(results, sizes, "new") == fit(sizes, "new") == Unknown("new: seed 2 diverged")
    assert isinstance(fit(sizes, "baseline"), Fit)
    said = lines(results)
    assert "New, gain along size (20 tokens per parameter): no slope (new: seed 2 diverged)." in said
    assert "Rung 2x32@20, New: seed 2 diverged (after step 9)." in said
    assert "Rung 2x32@20 went through the training data 1.5 times." in said
    assert not any("went through" in line for line in lines(planted()))


def test_two_rungs_of_one_size_are_no_series() -> None:
    """Of other shapes: there is nothing along which a gain could change."""
    one = planted().rungs[0]
    wide = dataclasses.replace(one, name="1x64@20", d_model=64)
    results = dataclasses.replace(planted(), rungs=(one, wide))
    assert series(results) == []
    assert not any("along size" in line for line in lines(results))


# ------------------------------------------------------------------------------------------------------------ damaged


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tree: tree.pop("rungs"), "the field 'rungs' is missing"),
        (lambda tree: tree.update(format=2), "not a ladder of format 1"),
        (lambda tree: tree["rungs"][0]["arms"].pop("baseline"), "a rung lacks the baseline 'baseline'"),
        (lambda tree: tree["rungs"][0]["arms"]["new"]["losses"].update({"1": -1}), "no number above zero"),
        (lambda tree: tree["rungs"][0].update(tokens="many"), "tokens of 1x32@20 = 'many', no whole number from 1 on"),
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


# ------------------------------------------------------------------------------------------------------ at single rungs


def test_rungs_are_tested_as_one_family() -> None:
    results = planted(worth=(1.0, 1.4, 1.0), noise=3e-3)
    tests = {test.rung: test for test in rung_tests(results)}
    assert list(tests) == [rung.name for rung in results.rungs]
    for rung in results.rungs:
        base, new = (list(rung.arms[name].losses.values()) for name in ("baseline", "new"))
        differences = [a - b for a, b in zip(new, base, strict=True)]
        test = tests[rung.name]
        assert (test.diff, test.low, test.high) == pytest.approx(paired_interval(differences))
        assert test.p == pytest.approx(paired_p(differences))
    assert [test.p_holm for test in tests.values()] == pytest.approx(holm([test.p for test in tests.values()]))
    told = [test for test in tests.values() if test.p_holm <= 0.05]
    assert 0 < len(told) < len(tests)
    said = [line for line in lines(results) if "loss than the baseline" in line]
    assert len(said) == len(told)
    for test, line in zip(told, said, strict=True):
        side = "lower" if test.diff < 0 else "higher"
        assert line.startswith(f"Rung {test.rung}, New: {side} loss than the baseline by {abs(test.diff):.4f} nats per")
    assert f"Of 3 differences at single rungs, {len(told)} can be told from noise." in lines(results)


@pytest.mark.parametrize(
    ("fields", "times"),
    [({"compared_before": 4}, 7), ({"looks": 2}, 6), ({}, 3)],
)
def test_what_was_looked_at_before_counts_at_rungs_as_well(fields: dict[str, Any], times: int) -> None:
    whole = planted(worth=(1.0, 1.4, 1.0), noise=3e-3)
    rungs = [dataclasses.replace(rung, **fields) if place == 0 else rung for place, rung in enumerate(whole.rungs)]
    results = dataclasses.replace(whole, rungs=tuple(rungs))
    test = rung_tests(results)[1]
    assert test.p_holm == pytest.approx(times * test.p)
    assert rung_tests(dataclasses.replace(results, not_begun=("a", "b")))[1].p_holm == pytest.approx(
        (times / (fields.get("looks", 1)) + 2) * fields.get("looks", 1) * test.p
    )


def test_rungs_that_are_a_choice_or_have_few_seeds_are_not_tested() -> None:
    whole = planted()
    assert rung_tests(dataclasses.replace(whole, earlier_rungs=(("1x32@20", "9x32@20"),))) == []
    assert [test.rung for test in rung_tests(fewer(whole, 1, 1, 3))] == [whole.rungs[0].name, whole.rungs[2].name]
