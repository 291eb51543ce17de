from __future__ import annotations

import json

import pytest
from fake_study import BASELINE, NONLINEAR, WIDER, arm, record, searched, write_study

from qurve.study.curves import MOST_POINTS_IN_ALL, loss_range
from qurve.study.dynamics import PICTURES
from qurve.study.page import plots
from qurve.study.results import load


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return load(write_study(tmp_path_factory.mktemp("study"), fates={("mlp-4.75", 2): "diverged"}))


def traces(plot, arm, layer="", **more):
    return [
        trace
        for trace in plot["traces"]
        if trace["meta"] == {"arm": arm, "layer": layer} and all(trace.get(key) == value for key, value in more.items())
    ]


def test_curves_have_mean_band_seeds_and_training(results):
    plot = plots.curves_plot(results)
    new = results.arms[2]
    (mean,) = [t for t in traces(plot, "res-gelu", yaxis="y") if "mean of 3" in t.get("hovertemplate", "")]
    assert (mean["x"][0], mean["x"][-1]) == (0, 400)
    assert mean["y"][-1] == pytest.approx(new.val_loss, abs=1e-5)
    (shade,) = traces(plot, "res-gelu", yaxis="y", fill="toself")
    losses = [run.val_loss for run in new.finished]
    assert max(losses) == pytest.approx(
        max(y for x, y in zip(shade["x"], shade["y"], strict=True) if x == 400), abs=1e-5
    )
    assert min(losses) == pytest.approx(
        min(y for x, y in zip(shade["x"], shade["y"], strict=True) if x == 400), abs=1e-5
    )
    (seeds,) = traces(plot, "res-gelu", "seeds", yaxis="y")
    assert seeds["x"].count(None) == 3
    assert set(seeds["text"]) == {"1", "2", "3"}
    assert len(seeds["x"]) == len(seeds["y"]) == len(seeds["text"])
    assert [layer["name"] for layer in plot["layers"]] == ["training", "seeds"]
    (dashed,) = [t for t in plot["traces"] if t.get("line", {}).get("dash") and t["meta"]["layer"] == ""]
    assert dashed["meta"]["arm"] == results.best.name == "res-gelu"
    assert plot["layout"]["yaxis"]["range"] == list(loss_range(results))


def test_a_diverged_seed_is_crossed_and_enters_no_mean(results):
    plot = plots.curves_plot(results)
    (cross,) = [t for t in traces(plot, "mlp-4.75") if t.get("marker", {}).get("symbol") == "x"]
    assert (cross["x"], cross["text"]) == ([140], ["2"])
    assert any("mean of 2" in t.get("hovertemplate", "") for t in traces(plot, "mlp-4.75"))
    (own,) = [t for t in traces(plot, "mlp-4.75") if "text" in t and t["mode"] == "lines"]
    assert set(own["text"]) == {"2"}
    assert plot["arms"][1]["label"] == "MLP 4.75 (1 of 3 diverged)"


def test_gains_begin_at_the_first_evaluation_and_name_the_parameters(results):
    plot = plots.gains_plot(results)
    assert [arm["name"] for arm in plot["arms"]] == ["mlp-4.75", "res-gelu"]
    assert plot["arms"][0]["label"].startswith("MLP 4.75, 0.90 M")
    assert min(min(x for x in trace["x"] if x is not None) for trace in plot["traces"]) == 0
    assert "range" not in plot["layout"]["yaxis"]


def test_the_search_rings_what_was_chosen(results):
    plot = plots.search_plot(results)
    rings = [t for t in plot["traces"] if t.get("marker", {}).get("symbol") == "circle-open"]
    assert {t["meta"]["arm"]: t["x"] for t in rings} == {"baseline": [2e-3], "mlp-4.75": [4e-3], "res-gelu": [8e-3]}
    crosses = [t for t in plot["traces"] if t.get("marker", {}).get("symbol") == "x"]
    assert {x for trace in crosses for x in trace["x"]} == {1.6e-2}


def test_arms_at_the_baselines_point_stand_aside_in_their_architectures_colour(tmp_path):
    results = load(write_study(tmp_path, searched(BASELINE, WIDER, NONLINEAR)))
    for draw in (plots.curves_plot, plots.gains_plot):
        plot = draw(results)
        aside = {arm["name"]: arm["colour"] for arm in plot["arms"] if arm["aside"]}
        colours = {arm["name"]: arm["colour"] for arm in plot["arms"] if not arm["aside"]}
        assert aside == {f"{name}@baseline": colours[name] for name in ("mlp-4.75", "res-gelu")}
        dotted = {t["meta"]["arm"] for t in plot["traces"] if t.get("line", {}).get("dash") == "dot"}
        assert dotted == set(aside)
    assert not any(arm["aside"] for arm in plots.search_plot(results)["arms"])


def test_a_search_without_floors_names_none(tmp_path, results):
    with_floors = {label for t in plots.search_plot(results)["traces"] for label in t.get("customdata", ())}
    assert ", floor 0.0002" in with_floors
    folder = write_study(tmp_path, (BASELINE, WIDER))
    tree = json.loads((folder / "study.json").read_text())
    scores = [score for score in tree["search"]["scores"] if score["arm"] == "baseline"][::2]
    for score in scores:
        del score["point"]["train.min_lr"]
    tree["search"] |= {"scores": scores, "chosen": {}}
    (folder / "study.json").write_text(json.dumps(tree))
    plot = plots.search_plot(load(folder))
    assert {label for t in plot["traces"] for label in t.get("customdata", ())} == {""}
    assert [arm["name"] for arm in plot["arms"]] == ["baseline"]
    assert all(trace["x"] for trace in plot["traces"])


def test_a_label_is_no_markup_to_plotly(tmp_path):
    plot = plots.curves_plot(load(write_study(tmp_path, (BASELINE, arm("new", "<b>bold</b> $arm-1")), seeds=(1,))))
    assert {t["name"] for t in traces(plot, "new")} == {"&lt;b&gt;bold&lt;/b&gt; $arm-1"}


def test_nothing_run_yet_is_a_plot_without_traces(tmp_path):
    fates = {(name, seed): "missing" for name in ("baseline", "new") for seed in (1, 2)}
    results = load(write_study(tmp_path, (BASELINE, arm("new", "New")), seeds=(1, 2), fates=fates))
    for draw in (plots.curves_plot, plots.gains_plot):
        plot = draw(results)
        assert (plot["traces"], plot["layers"]) == ([], [])
        json.dumps(plot, allow_nan=False)


def test_many_long_runs_share_the_points(tmp_path):
    arms = (BASELINE, arm("new", "New"))
    few = load(write_study(tmp_path, arms, seeds=(1, 2), steps=900, every=1))
    plot = plots.curves_plot(few)
    assert all(len(trace["x"]) <= 2 * 400 + 2 for trace in plot["traces"])
    assert 200 * plots.points_a_run(200) <= MOST_POINTS_IN_ALL


def test_dynamics_are_small_multiples(tmp_path):
    write_study(tmp_path, fates={("mlp-4.75", 2): "diverged"}, search=False)
    for name in ("mlp-4.75", "res-gelu"):
        for seed in (1, 2, 3):
            record(tmp_path, name, seed, {f"{p}.norm": [float(seed + b) for b in range(5)] for p in ("query", "value")})
    plot = plots.PLOTS["dynamics-norms"](load(tmp_path))
    json.dumps(plot, allow_nan=False)
    assert [arm["name"] for arm in plot["arms"]] == ["mlp-4.75", "res-gelu"]
    layout = plot["layout"]
    assert [note["text"] for note in layout["annotations"]] == [f"block {n}" for n in range(5)]
    numbers = ("", *range(2, 6))  # Plotly's first axes have none
    assert all(layout[f"yaxis{n}"]["range"] == layout["yaxis"]["range"] for n in numbers)
    for (first, last), (low, high) in ((layout[f"{a}axis{n}"]["domain"] for a in "xy") for n in numbers):
        assert 0 <= first < last <= 1
        assert 0 <= low < high <= 1
    means = traces(plot, "res-gelu", xaxis="x3", yaxis="y3")
    assert [t["line"]["dash"] for t in means] == ["solid", "dash"]
    assert means[0]["y"] == [4.01, 5.0, 6.0, 7.0, 8.0]
    (_, broken, _, _) = traces(plot, "mlp-4.75", xaxis="x", yaxis="y")
    assert (broken["x"], broken["text"]) == ([1, 100, None], ["2"] * 3)
    assert broken["y"][:2] == [2.01, 3.0]
    assert [t["x"].count(None) for t in traces(plot, "mlp-4.75", "seeds", xaxis="x")] == [2, 2]


def test_four_panels_stand_in_a_square_and_what_is_always_zero_has_a_readable_range():
    layout = plots._small_multiples(PICTURES[-1], range(4), [{"x": [1, 400, None], "y": [0.0, 0.0, None]}])
    for first, second in (("xaxis", "xaxis3"), ("xaxis2", "xaxis4"), ("yaxis", "yaxis2"), ("yaxis3", "yaxis4")):
        assert layout[first]["domain"] == layout[second]["domain"]
    assert [layout[axis]["title"]["text"] for axis in ("xaxis", "xaxis2", "xaxis3", "xaxis4")] == [
        "",
        "",
        "",
        plots.STEP,
    ]
    assert layout["yaxis"]["range"] == [-0.05, 1.05]
