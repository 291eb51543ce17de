"""The page of what came out: what it says of the evidence, made of invented numbers, not the figures themselves."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_study import BASELINE, NONLINEAR, STEPS, WIDER, arm, config, searched, write_study

from qurve import plugins
from qurve.study.claims import evidence as stability_evidence
from qurve.study.evidence import compact_evidence
from qurve.study.ladder_results import LadderResults, measured, to_json
from qurve.study.paired import paired_interval, paired_p
from qurve.study.results import load
from qurve.study.study_json import read_study

ROOT = Path(__file__).parents[1]
plugins.make_importable(ROOT / "tools")
results = SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "results.py")))


def section(text: str, title: str) -> str:
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0]


def write(folder: Path, name: str, tree: Any) -> str:
    (folder / f"{name}.json").write_text(json.dumps(tree))
    return str(results.page(folder))


def test_without_evidence_every_section_says_so(tmp_path: Path) -> None:
    text = results.page(tmp_path)
    assert text.count("\n## ") == len(results.SECTIONS)
    assert " ".join(text.split()).count("is not among the results") == len(results.SECTIONS)
    assert "**No GPU has run it.**" in section(text, "Ten minutes of a GPU")
    assert max(map(len, text.splitlines())) <= 120


def test_the_noise_floor_comes_first_and_asks_for_seeds(tmp_path: Path) -> None:
    plugins.make_importable(ROOT / "experiments")
    noise = runpy.run_path(str(ROOT / "experiments" / "noise_floor.py"))["noise"]
    found = load(write_study(tmp_path / "study", (BASELINE, arm("a-a", "A/A", seed_offset=100)), search=False))
    tree = compact_evidence(found) | {"noise": noise(found)}
    text = write(tmp_path, "noise-floor", tree)
    assert text.index("## The noise floor") == text.index("\n## ") + 1
    text, of = section(text, "The noise floor"), tree["noise"]
    for key in ("baseline", "differences"):
        assert f"| 3 | {of[key]['value']:.4f} [{of[key]['low']:.4f}, {of[key]['high']:.4f}] |" in text
    assert "| cannot be told apart from the noise (3 seeds), as an A/A arm should be |" in text
    line = of["seeds_needed"][-1]
    assert f"| 2.4 % | {line['effect_nats']:.4f} | {line['seeds']['value']} | {line['seeds']['low']} to " in text
    assert f"3 seeds see {of['detectable_percent']:.2f} % and more." in text


def test_a_searched_study_shows_points_intervals_and_verdicts(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "study", fates={("mlp-4.75", 2): "diverged"})
    tree = compact_evidence(load(folder))
    text = write(tmp_path, "fair-search", tree | {"search": read_study(folder / "study.json")["search"]})
    text = section(text, "Best against best")
    assert (
        f"`qurve compare small --seeds 3`; 800,000 non-embedding parameters, {STEPS} steps of 2,048 tokens; 3 seeds"
        in text
    )
    assert "| res-gelu | 10 | train.lr 0.008, train.min_lr 0.00016 | 5.2000 | no |" in text
    row = next(row for row in tree["rows"] if row["arm"] == "res-gelu")
    shown = f"{row['diff']:+.4f} [{row['diff_low']:+.4f}, {row['diff_high']:+.4f}] | {row['dll_percent']:+.2f} %"
    assert shown in text
    assert row["verdict"] in text
    assert "lower loss than the baseline" in row["verdict"]
    assert "Not finished: MLP 4.75: seed 2 diverged" in text
    assert "Each arm at the points chosen for the others. Validation loss" in text
    assert "| arm | peak 2e-3, floor 2e-4 | peak 4e-3, floor 4e-4 | peak 8e-3, floor 1.6e-4 |" in text
    assert "**What it does not say.**" in text


def test_costs_and_useful_units_stand_beside_the_gains(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "study")
    tree = compact_evidence(load(folder)) | {"search": read_study(folder / "study.json")["search"]}
    of = {"fair-search": "Best against best", "controls": "Peak and floor apart"}
    of["at-the-peak"] = "Everybody at the layer's peak"
    for name, title in of.items():
        text = section(write(tmp_path, name, tree), title)
        gains, _, costs = text.partition("**What it costs.**")
        assert text.count("**Gains in useful units.**") == text.count("**Training saved.**") == 1
        for shown in tree["beside"][:2]:
            assert f"| {' | '.join(shown['head'])} |" in gains
            assert all(f"| {' | '.join(cells)} |" in gains for cells in shown["rows"])
        assert "| arm | N.E. parameters | all parameters | MFLOPs per token | tokens/s | peak memory |" in costs
        assert "| MLP 4.75 | 900,000 (+12.5 %) |" in costs
        row = tree["rows"][1]
        assert f"{row['p_signflip']:.4f}"[1:].rstrip("0") + f" (≥ .{str(row['p_signflip_least'])[2:]})" in gains


def test_arms_at_the_baselines_point_stand_in_a_table_of_their_own(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "study", searched(BASELINE, WIDER, NONLINEAR))
    tree = compact_evidence(load(folder)) | {"search": read_study(folder / "study.json")["search"]}
    text = section(write(tmp_path, "fair-search", tree), "Best against best")
    own, _, matched = text.partition("At the baseline's best point (a family of tests of its own):")
    assert "| MLP 4.75 | 3 |" in own
    assert "settings of Baseline" not in own
    assert matched.partition("**Gains in useful units.**")[0].count(", settings of Baseline | 3 |") == 2
    text = write(tmp_path, "ablations", tree | {"against_the_layer": tree["rows"]})
    of_the_layer = section(text, "Which parts matter").partition("Against the paper's layer:")[2]
    assert "settings of" not in of_the_layer.partition("**Gains in useful units.**")[0]


def test_the_papers_rows_stand_beside_ours(tmp_path: Path) -> None:
    found = load(write_study(tmp_path / "study", search=False))
    beside = runpy.run_path(str(ROOT / "experiments" / "table1.py"))["beside"]
    text = write(tmp_path, "table1", compact_evidence(found) | {"table": list(beside(found))})
    text = section(text, "Table 1")
    assert "0.008 to 0.00016, decay 0.1 | 2.8736 | +2.40 % |" in text
    assert "- Res. GELU (nonlinear query): lower loss than the baseline" in text


def test_a_gain_is_followed_along_the_steps(tmp_path: Path) -> None:
    plugins.make_importable(ROOT / "experiments")
    curves = runpy.run_path(str(ROOT / "experiments" / "figure2.py"))["curves"]
    found = load(write_study(tmp_path / "study", (BASELINE, NONLINEAR), search=False))
    text = write(tmp_path, "figure2", compact_evidence(found) | {"curves": curves(found), "unknown": ["who ran it"]})
    text = section(text, "Figure 2")
    assert "| configuration | parameters | n | step 20 |" in text
    assert "| step 400 |" in text
    assert "- who ran it" in text
    last = curves(found)["res-gelu"]["gain_percent"][-1]
    shown = f"{last['mean']:+.2f} ({last['smallest']:+.2f} to {last['largest']:+.2f})"
    assert "| Res. GELU (nonlinear query) | 800,512 | 3 | " in text
    assert f"| {shown} |" in text
    row = compact_evidence(found)["rows"][1]
    assert f"{row['diff']:+.4f} [{row['diff_low']:+.4f}, {row['diff_high']:+.4f}]" in text.partition("At the end:")[2]


def test_a_gain_of_one_seed_has_no_spread(tmp_path: Path) -> None:
    curves = runpy.run_path(str(ROOT / "experiments" / "figure2.py"))["curves"]
    found = load(write_study(tmp_path / "study", (BASELINE, NONLINEAR), seeds=(1,), search=False))
    text = write(tmp_path, "figure2", compact_evidence(found) | {"curves": curves(found), "unknown": []})
    assert " to " not in section(text, "Figure 2").partition("| configuration")[2].partition("At the end")[0]


def test_stability_says_what_is_seen_of_the_claims_and_what_is_an_inference(tmp_path: Path) -> None:
    points = tuple(
        arm(f"baseline@{lr:g}-0.05", "B", config=config(train__lr=lr, train__weight_decay=0.05)) for lr in (2e-3, 1e-2)
    )
    fates = {("baseline@0.01-0.05", 1): "diverged"}
    found = load(write_study(tmp_path / "study", points, seeds=(1,), search=False, fates=fates))
    text = section(write(tmp_path, "stability", stability_evidence(found)), "Stability")
    assert "| baseline | 0.05 | 0.002 |" in text
    said, _, inferred = text.partition("What we infer from it")
    claim = (
        "said to diverge: diverges before step 20,000 of 60,000 at this decay | arXiv 2603.13381, section 2.2 | 0.002"
    )
    assert f"{claim} | **not tested at its length: stable so far** |" in said
    assert "inferred" not in said
    assert inferred.count("inferred to diverge: no statement of ") == 3
    assert "**not run**" in text


def test_ablations_are_held_against_the_layer_too(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "study")
    tree = compact_evidence(load(folder))
    more = {"against_the_layer": tree["rows"][:1], "search": read_study(folder / "study.json")["search"]}
    text = section(write(tmp_path, "ablations", tree | more), "Which parts matter")
    text = text.partition("**Gains in useful units.**")[0]
    assert text.partition("Against the paper's layer:")[2].count("| Baseline |") == 1
    assert text.count("| MLP 4.75 |") == 1
    assert "| mlp-4.75 | 10 | train.lr " in text


def test_arms_that_chose_at_an_open_edge_are_named_in_what_a_section_does_not_say(tmp_path: Path) -> None:
    lowest, highest = (
        arm(name, name.title(), config=config(train__lr=lr, train__min_lr=lr / 10))
        for name, lr in (("low", 1e-3), ("high", 1.6e-2))
    )
    said = {}
    for name, arms in {"none": (WIDER,), "one": (WIDER, lowest), "two": (lowest, highest)}.items():
        folder = write_study(tmp_path / name, (BASELINE, *arms))
        tree = compact_evidence(load(folder)) | {"search": read_study(folder / "study.json")["search"]}
        text = section(write(tmp_path, "fair-search", tree), "Best against best")
        said[name] = " ".join(text.partition("**What it does not say.**")[2].split())
    assert "edge" not in said["none"]
    assert (
        "1 arm chose a point at an open edge of the grid, which was extended no further: Low (peak 0.001)."
        in said["one"]
    )
    assert "2 arms chose points at an open edge" in said["two"]
    assert "Low (peak 0.001), High (peak 0.016). Whether a better point lies beyond" in said["two"]


def test_context_names_its_yardstick(tmp_path: Path) -> None:
    tree = compact_evidence(load(write_study(tmp_path / "study", (BASELINE, WIDER), search=False)))
    gain = {key: value for key, value in tree["rows"][1].items() if key != "arm"}
    gains = [{"of": "query", "from": "baseline", "to": "mlp-4.75", **gain}]
    yardstick = {"dll_percent": 1.78, "what": "rotary", "source": "somewhere"}
    text = section(write(tmp_path, "context", tree | {"gains": gains, "yardstick": yardstick}), "Other surroundings")
    assert "| query | Baseline | MLP 4.75 |" in text
    assert "yardstick is 1.78 %: rotary (somewhere)" in text


def test_a_ladder_shows_rungs_and_slopes(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "rung", (BASELINE, NONLINEAR), search=False)
    rung = measured(folder, "2x32@20", (2, 32), 20.0, 10**6)
    found = LadderResults("ladder", "A ladder", "qurve study ladder x", "baseline", "f" * 64, (rung,))
    text = section(write(tmp_path, "ladder", json.loads(to_json(found))), "Along size and length")
    assert "| 2x32@20 | 800,000 | 819,200 | 3 |" in text
    assert "gain, Res. GELU (nonlinear query)" in text


def test_a_gpus_quarter_of_an_hour(tmp_path: Path) -> None:
    arms = {
        "baseline": {"val": 4.0, "test": 4.1, "test_differences": [0.0] * 3, "diff": 0.0},
        "res-gelu": {
            "val": 3.9,
            "test": 4.0,
            "diff": -0.1,
            "low": -0.1248,
            "high": -0.0752,
            "p": 0.003,
            "p_holm": 0.0033,
        },
    }
    tree = {
        "command": "python x.py",
        "machine": {"gpu": "a large one", "torch": "9.9"},
        "rehearsal": False,
        "runs": [],
        **{"steps": 300, "tokens_per_step": 32_768, "rates": [1e-3, 2e-3], "search_seed": 101},
        "non_embedding": {"baseline": 10, "res-gelu": 11},
        "summary": {"chosen": {"baseline": 1e-3, "res-gelu": 2e-3, "mlp": None}, "seeds": [1, 2, 3], "arms": arms}
        | {"edges": ["res-gelu"], "diverged": ["qk-norm, seed 2"]},
    }
    text = section(write(tmp_path, "quarter-hour-gpu", tree), "Ten minutes of a GPU")
    assert "`python x.py`; a large one; torch 9.9" in text
    assert "| res-gelu | 11 | 0.002 (edge) | 3.9000 | 4.0000 | -0.1000 [-0.1248, -0.0752] | 0.0033 |" in text
    assert "Best at the edge of the rates tried, so that a better one may lie outside: res-gelu." in text
    assert "Diverged at the chosen rate: qk-norm, seed 2." in text
    assert "Without a rate at which it trains: mlp." in text
    with pytest.raises(ValueError, match="no evidence"):
        write(tmp_path, "quarter-hour-gpu", tree | {"rehearsal": True})


@pytest.mark.parametrize("file", sorted((ROOT / "results").glob("*.json")), ids=lambda file: file.stem)
def test_the_rows_of_the_evidence_are_those_of_its_losses(file: Path) -> None:
    """Means, differences, intervals and p again from every seed's loss: no figure of the page is written by hand."""
    tree = json.loads(file.read_text())
    arms = {arm["arm"]: arm["final_loss"] for arm in tree.get("arms", ()) if isinstance(arm, dict)}
    rows = [row for row in tree.get("rows", ()) if row.get("arm") in arms and row.get("diff") is not None]
    base = arms.get(tree.get("baseline"), {})
    for row in rows:
        losses = arms[row["arm"]]
        differences = [losses[seed] - base[seed] for seed in losses]
        mean, low, high = paired_interval(differences)
        assert (row["diff"], row["diff_low"], row["diff_high"]) == pytest.approx((mean, low, high))
        assert row["p"] == pytest.approx(paired_p(differences))
        assert row["final_loss"] == pytest.approx(sum(losses.values()) / len(losses))
    if arms:
        assert rows, "an experiment's evidence without a comparison"


@pytest.mark.parametrize(
    ("loss", "said"), [(5.0, "all have the same validation loss to the last digit"), (5.1, "1 differ")]
)
def test_runs_that_a_clean_tree_made_again_are_compared(loss: float, said: str, tmp_path: Path) -> None:
    def evidence(code: str, loss: float) -> dict[str, Any]:
        origin = {"code": [f"commit a{code}"], "hashes": {"baseline": {"1": "sha", "2": f"other{code}"}}}
        arms = [{"arm": "baseline", "val_loss": {"1": loss, "2": loss + 1}}]
        return {"origin": origin, "arms": arms}

    (tmp_path / "fair-search.json").write_text(json.dumps(evidence("+changes", 5.0)))
    (tmp_path / "noise-floor.json").write_text(json.dumps(evidence("", loss)))
    (tmp_path / "noise.json").write_text(json.dumps(evidence("+changes", 9.0)))
    (words,) = results.made_again(tmp_path / "fair-search.json")
    assert words == f"1 of its runs were made again from a tree without changes (`results/noise-floor.json`): {said}."
    assert list(results.made_again(tmp_path / "noise-floor.json")) == []
