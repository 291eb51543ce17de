from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from qurve import accounting, presets
from qurve.config import content_hash, differences, from_dict
from qurve.errors import BadInput
from qurve.study.definition import Arm, Study, grid_study, load_study
from qurve.study.looks import Seen
from qurve.study.search import Search
from qurve.study.study_json import read_study
from qurve.train.config import RunConfig
from tiny import tiny


def study(*names: str, seeds: tuple[int, ...] = (1, 2), baseline: str = "baseline") -> Study:
    """Arms that differ in one setting, so that they are no runs twice."""
    arms = (Arm(name, name.title(), tiny(f"train.beta2={0.95 - 0.01 * place}")) for place, name in enumerate(names))
    return Study("tiny", "A tiny study", tuple(arms), seeds, baseline)


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b", "-x", ".hidden", "ü", "a\n"])
def test_names_that_are_no_folders_are_refused(name: str) -> None:
    with pytest.raises(BadInput, match="becomes a folder"):
        Arm(name, "label", tiny())


@pytest.mark.parametrize("name", ["baseline", "mlp-4.75", "lr=3e-4", "A_b+c@2"])
def test_names_that_make_folders_are_taken(name: str) -> None:
    assert Arm(name, "label", tiny()).name == name


def test_arms_need_names_of_their_own() -> None:
    with pytest.raises(BadInput, match=r"names of their own, not baseline, baseline"):
        study("baseline", "baseline")
    with pytest.raises(BadInput, match="none at all"):
        study()


def test_baseline_must_be_an_arm() -> None:
    with pytest.raises(BadInput, match="'basline' is no arm; did you mean 'baseline'"):
        study("baseline", "other", baseline="basline")


@pytest.mark.parametrize("seeds", [(), (1, 1)])
def test_seeds_must_be_different_and_some(seeds: tuple[int, ...]) -> None:
    with pytest.raises(BadInput, match="seeds must be different and at least one"):
        study("baseline", seeds=seeds)


def test_settings_reach_every_arm() -> None:
    changed = study("baseline", "other").change(["model.dropout=0.5"], steps=9)
    for before, arm in zip(study("baseline", "other").arms, changed.arms, strict=True):
        assert differences(before.config, arm.config) == {"model.dropout": (0.0, 0.5), "train.steps": (4, 9)}
    with pytest.raises(BadInput, match="there is no field 'lrr'"):
        study("baseline").change(["train.lrr=1"])


def test_a_control_carries_its_match_until_its_model_changes() -> None:
    config = tiny()
    wide, match = accounting.mlp_widened(config.model, match="params", by=0.5)
    control = Arm("wide", "Wide", dataclasses.replace(config, model=wide), match=match)
    one = Study("tiny", "A tiny study", (Arm("baseline", "Baseline", config), control))
    assert [arm["match"] for arm in json.loads(one.to_json(""))["arms"]] == [None, str(match)]
    assert one.change(["train.lr=0.1"]).arms[1].match == match
    assert one.change(["model.n_layers=3"]).arms[1].match is None


def test_a_run_is_its_arm_with_its_seed() -> None:
    one = study("baseline")
    assert differences(one.arms[0].config, one.run_config(one.arms[0], 7)) == {"train.seed": (1, 7)}


def test_an_a_a_arm_has_the_batches_of_the_seed_and_weights_of_another() -> None:
    twin = Arm("a-a", "A/A", tiny(), seed_offset=1000)
    one = Study("tiny", "A tiny study", (Arm("baseline", "Baseline", tiny()), twin))
    found = differences(tiny(), one.run_config(twin, 2))
    assert found == {"train.seed": (1, 1002), "data.order_seed": (None, 2)}
    fixed = one.change(["data.order_seed=42"])  # as the paper's: the order is the same for every seed
    assert fixed.run_config(fixed.arms[1], 2).data.order_seed == 42
    assert [arm["seed_offset"] for arm in json.loads(one.to_json(""))["arms"]] == [0, 1000]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": tiny("train.lr=0.02")}, "give it the configuration of the baseline, baseline"),
        ({"name": "baseline"}, "give it the configuration of the baseline, baseline, and leave that one without"),
        ({"seed_offset": 2}, "weights of seed 3, which is one of the study's; take a larger one"),
    ],
)
def test_an_a_a_arm_is_the_baseline_from_weights_that_no_other_run_has(change: dict[str, Any], message: str) -> None:
    twin = dataclasses.replace(Arm("a-a", "A/A", tiny(), seed_offset=1000), **change)
    others = () if twin.name == "baseline" else (Arm("baseline", "Baseline", tiny()),)
    with pytest.raises(BadInput, match=message):
        Study("tiny", "A tiny study", (*others, twin))
    with pytest.raises(BadInput, match="a seed is at least 0"):
        Arm("a-a", "A/A", tiny(), seed_offset=-1)


@pytest.mark.parametrize("looks", [(2, 4), (5, 3), (3, 3), (0,)])
def test_looks_are_ascending_numbers_of_seeds_that_can_end_in_a_verdict(looks: tuple[int, ...]) -> None:
    with pytest.raises(BadInput, match=r"looks are (ascending numbers of seeds, each at least 3|whole numbers from 1)"):
        dataclasses.replace(study("baseline"), looks=looks)


def test_a_study_has_a_number_of_seeds_at_which_a_look_is_declared_or_too_few_for_one() -> None:
    one = dataclasses.replace(study("baseline"), looks=(3, 5))
    assert json.loads(one.to_json(""))["looks"] == [3, 5]
    for n in (1, 2, 3, 5):
        assert len(dataclasses.replace(one, seeds=tuple(range(n))).seeds) == n
    with pytest.raises(BadInput, match="looks are declared at 3, 5 seeds, so there would be no verdict with 4"):
        dataclasses.replace(one, seeds=(1, 2, 3, 4))


def test_study_json_holds_what_a_report_needs() -> None:
    one = study("baseline", "other")
    tree = json.loads(one.to_json("qurve compare tiny.py"))
    assert {key: tree[key] for key in ("format", "name", "title", "baseline", "seeds", "command", "search")} == {
        "format": 1,
        "name": "tiny",
        "title": "A tiny study",
        "baseline": "baseline",
        "seeds": [1, 2],
        "command": "qurve compare tiny.py",
        "search": None,
    }
    cost = accounting.count(tiny().model)
    for arm, its in zip(tree["arms"], one.arms, strict=True):
        assert from_dict(RunConfig, arm["config"]) == its.config
        assert (arm["non_embedding"], arm["total"]) == (cost.non_embedding, cost.total)
        assert arm["flops_per_token"] == cost.flops_per_token


def test_study_json_holds_the_search_that_the_rates_come_from() -> None:
    small = load_study("small")
    assert small.search is not None
    assert json.loads(small.to_json("qurve compare"))["search"] == json.loads(json.dumps(small.search))


# --------------------------------------------------------------------------------------------------------- built in


def test_small_study_is_the_papers_three_architectures_at_their_searched_rates() -> None:
    small = load_study("small")
    assert [arm.name for arm in small.arms] == ["baseline", "mlp-4.75", "res-gelu"]
    assert small.baseline == "baseline"
    assert len(small.seeds) >= 3
    assert isinstance(small.search, dict)
    for arm in small.arms:
        own = {"train.lr": arm.config.train.lr, "train.min_lr": arm.config.train.min_lr}
        assert own == small.search["chosen"][arm.name]["point"]
        assert own in [score["point"] for score in small.search["scores"] if score["arm"] == arm.name]


def test_arms_of_the_small_study_differ_in_architecture_and_rate_alone() -> None:
    base, wide, nonlinear = (arm.config for arm in load_study("small").arms)
    rate = {"train.lr", "train.min_lr"}
    assert differences(base, wide).keys() - rate == {"model.d_ff"}
    assert all(key.startswith("model.query.") for key in differences(base, nonlinear).keys() - rate)
    query = {key for key in differences(base, nonlinear) if key.startswith("model.query.")}
    assert "model.query.kind" in query


@pytest.mark.parametrize("name", ["small", "paper"])
def test_the_papers_controls_are_matched(name: str) -> None:
    matched = {arm.name: arm.match for arm in load_study(name).arms}
    for arm, match in matched.items():
        assert (match is not None) == arm.startswith("mlp-4.75")
        assert match is None or abs(match.error) < 1e-3


def test_paper_study_is_the_six_rows_of_table_1() -> None:
    paper = load_study("paper")
    assert [arm.name for arm in paper.arms] == [
        "baseline",
        "mlp-4.75",
        "mlp-4.75-scaled",
        "res-gelu-wd005",
        "res-gelu-4e-3",
        "res-gelu-best",
    ]
    assert len(paper.seeds) >= 3
    for arm in paper.arms:
        assert arm.config == presets.get(f"paper/{arm.name}")
        assert arm.paper == presets.PRINTED[f"paper/{arm.name}"]
        assert arm.label != arm.name
    losses = [arm.paper["val_loss"] for arm in paper.arms if arm.paper]
    assert losses == ["2.9441", "2.9165", "2.9173", "2.9015", "2.8750", "2.8736"]


def twins(second: Arm, **more: Any) -> Study:
    return Study("tiny", "A tiny study", (Arm("baseline", "Baseline", tiny()), second), (1, 2), **more)


SAME = {
    "the same": tiny(),
    "another seed, which the study gives": tiny("train.seed=9"),
    "what changes no number": tiny("train.log_every=3"),
    "one number written in two ways": tiny("train.grad_clip=1"),
}


@pytest.mark.parametrize("config", SAME.values(), ids=SAME)
def test_arms_that_would_be_the_same_runs_are_refused(config: RunConfig) -> None:
    with pytest.raises(BadInput, match=r"baseline and twin are the same configuration, .* \(seed_offset=1000\)"):
        twins(Arm("twin", "Twin", config))


def test_arms_that_a_search_would_make_the_same_are_refused() -> None:
    faster = Arm("twin", "Twin", tiny("train.lr=0.1"))
    assert len(twins(faster).arms) == 2
    both = 'eval.splits=["val","test"]'
    arms = (Arm("baseline", "Baseline", tiny(both)), Arm("twin", "Twin", tiny(both, "train.lr=0.1")))
    for space in ({"train.lr": (1e-2, 2e-2)}, {"train.lr": (1e-2, 2e-2), "model.d_ff": (64, 96)}):
        with pytest.raises(BadInput, match="baseline and twin are the same configuration but for what is searched"):
            Study("tiny", "", arms, (1, 2), search=Search(space))


def test_a_match_that_is_the_baseline_is_refused() -> None:
    """The paper's layer has as many FLOPs as the baseline: norms and activations are not counted."""
    layer, baseline = tiny("model.query=bottleneck"), tiny()
    wide, how_near = accounting.match("flops", layer.model, baseline.model)
    assert wide == baseline.model
    with pytest.raises(BadInput, match="baseline and twin are the same configuration"):
        twins(Arm("twin", "FLOP-matched", dataclasses.replace(baseline, model=wide), match=how_near))


def test_settings_that_make_two_arms_the_same_are_refused() -> None:
    with pytest.raises(BadInput, match="are the same configuration"):
        twins(Arm("twin", "Twin", tiny("train.lr=0.1"))).change(["train.lr=0.1"])


def test_a_seed_offset_makes_other_runs_and_the_same_one_twice_does_not() -> None:
    twin = Arm("twin", "A/A", tiny(), seed_offset=1000)
    assert len(twins(twin).arms) == 2
    with pytest.raises(BadInput, match="twin and again are the same configuration"):
        Study("tiny", "", (Arm("baseline", "Baseline", tiny()), twin, dataclasses.replace(twin, name="again")), (1, 2))


def test_an_arm_that_is_out_is_no_run_and_no_twin_of_its_own_match() -> None:
    chosen = {"baseline": {"point": {"train.lr": 0.1}, "val_loss": 3.0}, "wide": {"point": None, "val_loss": None}}
    found = {"axes": ["train.lr"], "seeds": [101], "steps": 4, "chosen": chosen, "scores": []}
    wide = Arm("wide", "Wide", tiny("model.d_ff=96", "train.lr=0.1"))
    assert [arm.name for arm in twins(wide).settled(found).arms] == ["baseline", "wide", "wide@baseline"]


def test_every_run_of_a_study_has_a_hash_of_its_own() -> None:
    for name in ("small", "paper"):
        one = load_study(name)
        hashes = [content_hash(one.run_config(arm, seed)) for arm in one.arms for seed in one.seeds]
        assert len(set(hashes)) == len(hashes)


# ------------------------------------------------------------------------------------------------------ from a file


def test_a_python_file_exposes_its_study(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from qurve import presets\n"
        "from qurve.study.definition import Arm, Study\n"
        "STUDY = Study('mine', 'Mine', (Arm('baseline', 'Base', presets.get('smoke')),), seeds=(4,))\n"
    )
    loaded = load_study(str(file))
    assert (loaded.name, loaded.seeds, loaded.arms[0].config) == ("mine", (4,), presets.get("smoke"))


@pytest.mark.parametrize("text", ["", "STUDY = 3\n", "study = None\n"])
def test_a_file_without_a_study_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(BadInput, match=r"mine\.py does not expose a qurve Study as STUDY"):
        load_study(str(file))


def test_what_is_no_study_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no study 'papr'; did you mean 'paper'"):
        load_study("papr")
    with pytest.raises(BadInput, match="there is no file"):
        load_study(str(tmp_path / "missing.py"))


def bad(**fields: Any) -> Study:
    return Study(**{"name": "s", "title": "S", "arms": (Arm("baseline", "Baseline", tiny()),), **fields})


EVIDENCE = presets.small_search()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seeds": ("1", "2")}, "seeds are whole numbers from 0, not"),
        ({"seeds": (True, 2.0)}, "seeds are whole numbers"),
        ({"seeds": (-1, 2)}, "seeds are whole numbers"),
        ({"seeds": 3}, "seeds are whole numbers"),
        ({"seeds": (1, 2, 3), "looks": (3, 3.5)}, "looks are whole numbers from 1"),
        ({"looks": ("3",)}, "looks are whole numbers"),
        ({"title": 5}, "its title is a text"),
        ({"arms": ("baseline",)}, "each of its arms an Arm"),
        ({"name": "../../evil"}, "a study's name becomes a folder"),
        ({"name": "n" * 300}, "at most 250 letters"),
        ({"search": {"chosen": 5}}, "neither a Search nor the evidence of one"),
        ({"search": 5}, "neither a Search nor the evidence of one"),
        ({"search": {**EVIDENCE, "scores": [5]}}, "neither a Search nor the evidence of one"),
        ({"search": EVIDENCE, "seeds": (1, 101)}, "seed 101 is one of the search and of the comparison"),
        ({"search": {**EVIDENCE, "seeds": [5]}, "seeds": (1, 102)}, "seed 102 is one of the search"),
        ({"arms": tuple(Arm(n, n, tiny()) for n in ("baseline", "Baseline"))}, "names of their own"),
        ({"arms": (Arm("baseline", "B", tiny()), Arm("a" * 121, "A", tiny()))}, "at most 120 letters"),
        (
            {
                "arms": (Arm("baseline", "B", tiny()), Arm("a-a", "A/A", tiny(), seed_offset=100)),
                "search": Search({"train.lr": (1e-3,)}),
            },
            "seed 101 is one of the search and of the comparison",
        ),
    ],
)
def test_what_no_report_could_read_is_refused_before_anything_is_made(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        bad(**fields)


@pytest.mark.parametrize("fields", [{"seeds": [1, 2]}, {"search": EVIDENCE}, {"seeds": (1, 2, 3), "looks": (3, 5)}])
def test_what_is_written_can_be_read(fields: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text(
        bad(**fields).to_json("", Seen([(1,)], {"baseline": [(1, 2)]}, {"own": ["a"]}))
    )
    tree = read_study(tmp_path / "study.json")
    assert tree["looked_in_pool"] == {"baseline": [[1, 2]]}
    assert tree["compared_in_pool"] == {"own": ["a"]}
    with pytest.raises(BadInput, match="a seed is a whole number"):
        bad().to_json("", Seen([("1",)]))  # type: ignore[list-item]


def test_a_file_that_ends_the_process_is_named(tmp_path: Path) -> None:
    (tmp_path / "study.py").write_text("import sys; sys.exit(0)")
    with pytest.raises(BadInput, match=r"study\.py cannot be run: it ends the process \(sys\.exit\(0\)\)"):
        load_study(str(tmp_path / "study.py"))


@pytest.mark.parametrize("raised", ["GeneratorExit", "type('Own', (BaseException,), {})"])
def test_a_file_that_raises_what_is_no_exception_is_named(raised: str, tmp_path: Path) -> None:
    (tmp_path / "study.py").write_text(f"raise {raised}")
    with pytest.raises(BadInput, match=r"study\.py cannot be run: (GeneratorExit|Own)"):
        load_study(str(tmp_path / "study.py"))


def test_an_interrupt_while_a_file_is_run_stays_one(tmp_path: Path) -> None:
    (tmp_path / "study.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_study(str(tmp_path / "study.py"))


def test_studies_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_study("small").name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    "setting",
    [
        "eval.windows=2",
        "eval.every=1",
        "data.tokenizer=bpe:300",
        "train.threads=2",
        "train.steps=3",
        "train.tokens_per_step=256",
        "train.loss_bound=9",
        "train.loss_bound_steps=3",
        "model.context=16",
    ],
)
def test_arms_that_are_not_compared_alike_are_refused(setting: str) -> None:
    arms = (Arm("baseline", "Baseline", tiny()), Arm("other", "Other", tiny(setting)))
    with pytest.raises(BadInput, match=r"every arm needs the same .*, and other has"):
        Study("unequal", "Unequal", arms)


def test_every_arm_predicts_the_same() -> None:
    mlm = ("train.objective=mlm", "model.attends=bidirectional")
    arms = (Arm("baseline", "Baseline", tiny()), Arm("other", "Other", tiny(*mlm)))
    with pytest.raises(BadInput, match=r"every arm needs the same model\.attends"):
        Study("s", "S", arms)
    arms = tuple(Arm(f"rate-{rate}", "Arm", tiny(*mlm, f"train.objective.rate={rate}")) for rate in ("0.1", "0.2"))
    with pytest.raises(BadInput, match=r"every arm needs the same train\.objective\.rate"):
        Study("s", "S", arms, baseline="rate-0.1")
    for axis in ("train.objective=causal,mlm", "train.objective.rate=0.1,0.2", "model.attends=causal,prefix"):
        with pytest.raises(BadInput, match="every arm of a study needs the same"):
            grid_study("smoke", [axis], mlm)
    study = grid_study("smoke", ["model.query=linear,bottleneck"], mlm)
    assert {arm.config.train.objective.kind for arm in study.arms} == {"mlm"}
    assert load_study("small").change(mlm).arms[2].config.model.attends == "bidirectional"


def test_arms_are_compared_on_val() -> None:
    with pytest.raises(BadInput, match="compared on val"):
        Study("blind", "Blind", (Arm("baseline", "Baseline", tiny('eval.splits=["train"]')),))


@pytest.mark.parametrize("text", ["1/0", "STUDY = (", "import nothing_of_this_name"])
def test_a_broken_study_file_is_named_with_its_error(text: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(text)
    with pytest.raises(BadInput, match=rf"{file} cannot be run: \w+Error"):
        load_study(str(file))


# ---------------------------------------------------------------------------------------------------------------- grids


def test_a_grid_makes_an_arm_of_every_point_and_the_first_the_baseline() -> None:
    study = grid_study("smoke", ["train.lr=1e-3,2e-3", "model.dropout=0,0.1"], ["train.min_lr=1e-4"])
    assert [arm.name for arm in study.arms] == [
        "lr=1e-3+dropout=0",
        "lr=1e-3+dropout=0.1",
        "lr=2e-3+dropout=0",
        "lr=2e-3+dropout=0.1",
    ]
    assert [(arm.config.train.lr, arm.config.model.dropout) for arm in study.arms] == [
        (1e-3, 0.0),
        (1e-3, 0.1),
        (2e-3, 0.0),
        (2e-3, 0.1),
    ]
    assert {arm.config.train.min_lr for arm in study.arms} == {1e-4}
    assert study.baseline == "lr=1e-3+dropout=0"
    assert study.name == "smoke-lr-dropout"
    assert len({content_hash(arm.config) for arm in study.arms}) == 4


def test_a_grids_names_are_told_apart_and_can_be_folders() -> None:
    grid = ["model.query.width=8", "model.key=bottleneck", "model.key.width=8,9"]
    names = [arm.name for arm in grid_study("small/res-gelu", grid).arms]
    assert names == ["query.width=8+model.key=bottleneck+key.width=8", "query.width=8+model.key=bottleneck+key.width=9"]
    objects = ['{"kind":"bottleneck","width":8}', '{"kind": "bottleneck", "width": 16}', "{}"]
    study = grid_study("small/res-gelu", [f"model.query={','.join(objects[:2])}"])
    assert [arm.config.model.query.width for arm in study.arms] == [8, 16]  # type: ignore[attr-defined]
    assert [arm.name for arm in study.arms] == ["query=-kind-bottleneck-width-8", "query=-kind-bottleneck-width-16"]


def test_points_whose_names_would_be_one_folder_are_numbered() -> None:
    full = presets.get("small/res-gelu").model.query
    values = [json.dumps({"kind": "bottleneck", **dataclasses.asdict(full), "scale": scale}) for scale in (0.5, 0.25)]
    first, second = grid_study("small/res-gelu", [f"model.query={','.join(values)}"]).arms
    assert len(first.name) == 100
    assert second.name == f"{first.name}-2"


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (["train.lr"], "write it as path=value,value"),
        (["train.lr="], "write it as path=value,value"),
        (["=1,2"], "write it as path=value,value"),
        (["train.lr=1e-3,,2e-3"], "write it as path=value,value"),
        (["train.lr=1e-3,0.001"], "the points lr=1e-3 and lr=0.001 are the same configuration"),
        (["train.log_every=1,2"], "are the same configuration"),
        (["train.lr=1e-3", "train.lr=2e-3"], "a path is given twice"),
        (["train.min_rl=1e-3,2e-3"], "--grid train.min_rl: there is no field 'min_rl'; did you mean 'min_lr'?"),
        (["train.lr=1e-3,fast"], "train.lr = 'fast' is not a finite number"),
        (["train.steps=1,2"], "--grid train.steps: every arm of a study needs the same; --set train.steps="),
        (["model.context=32,64"], "--grid model.context: every arm of a study needs the same"),
        (["data.order=epochs,paper"], "--grid data.order: every arm"),
        (["train.seed=1,2"], "every arm is trained with every seed"),
        (["train.lr=" + ",".join(map(str, range(1, 1002)))], "1,001 points"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(grid: list[str], message: str) -> None:
    with pytest.raises(BadInput, match=re.escape(message)):
        grid_study("smoke", grid)


def test_a_grid_varies_a_preset_alone() -> None:
    with pytest.raises(BadInput, match="varies a preset, and 'smok' is none; did you mean 'smoke'"):
        grid_study("smok", ["train.lr=1e-3,2e-3"])
