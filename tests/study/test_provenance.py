from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
from itertools import pairwise

from fake_study import write_study

from qurve.config import apply_settings, differences, to_dict
from qurve.presets import get
from qurve.runfolder import MEASURED, RunFolder
from qurve.study.provenance import commands, provenance, single_run
from qurve.study.results import load
from qurve.train.loop import train
from tiny import tiny


def test_hashes_of_data_order_code_environment_and_configuration(tmp_path):
    results = load(write_study(tmp_path))
    found = provenance(results)
    assert found.data == ("f" * 64,)
    assert found.code == (f"qurve ?, commit {'0' * 40}",)
    assert len(found.environments) == 1  # whatever the time
    assert found.configurations["res-gelu", 3] == "hash"
    assert len(found.configurations) == 9
    assert len(found.order) == 64
    shorter = load(write_study(tmp_path / "two", seeds=(1, 2)))
    assert provenance(shorter).order != found.order


def test_runs_on_one_machine_have_one_environment_whatever_was_measured(tmp_path, data):
    folder = write_study(tmp_path / "study", seeds=(1, 2))
    for seed in (1, 2):
        made = train(tiny(f"train.seed={seed}"), tmp_path / str(seed), data)
        for file in folder.glob(f"runs/*/seed-{seed}/environment.json"):
            shutil.copy(made.environment_file, file)
    runs = [RunFolder(path) for path in folder.glob("runs/*/*")]
    for place, run in enumerate(runs):
        run.add_to_environment(dict.fromkeys(MEASURED, place))
    assert len(provenance(load(folder)).environments) == 1
    runs[0].add_to_environment({"torch": "another"})
    assert len(provenance(load(folder)).environments) == 2


def test_a_damaged_or_missing_run_tells_nothing_and_stops_nothing(tmp_path):
    folder = write_study(tmp_path, fates={("baseline", 1): "missing"})
    (folder / "runs" / "res-gelu" / "seed-2" / "config.json").write_text("{")
    found = provenance(load(folder))
    assert ("baseline", 1) not in found.configurations
    assert ("res-gelu", 2) not in found.configurations
    assert found.data == ("f" * 64,)


def test_the_commit_is_named_where_the_runs_agree_on_it(tmp_path):
    folder = write_study(tmp_path)
    assert commands(load(folder)) == [f"git checkout {'0' * 40}", "qurve compare small --seeds 3"]
    file = folder / "runs" / "baseline" / "seed-1" / "environment.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "commit": "1" * 40}))
    assert commands(load(folder)) == ["qurve compare small --seeds 3"]


def arm_of(results, config, command="qurve compare study.py"):
    results = dataclasses.replace(results, command=command)
    return results, dataclasses.replace(results.arms[0], config=to_dict(config))


def test_a_single_run_of_an_a_a_arm_has_its_batches_and_its_weights(tmp_path):
    results, arm = arm_of(load(write_study(tmp_path, seeds=(4, 5))), get("small/baseline"))
    words = shlex.split(single_run(results, dataclasses.replace(arm, seed_offset=1000)))
    assert words[words.index("--seed") + 1] == "1004"
    assert "data.order_seed=4" in words


def test_a_single_run_is_the_nearest_preset_and_what_differs(tmp_path):
    results = load(write_study(tmp_path, seeds=(4, 5)))
    wanted = apply_settings(get("small/res-gelu"), ["model.query.width=32", "train.lr=0.003", "train.seed=9"])
    words = shlex.split(single_run(*arm_of(results, wanted, "qurve compare study.py --data 'my corpus'")))
    assert words[:3] == ["qurve", "train", "small/res-gelu"]
    assert words[words.index("--seed") + 1] == "4"
    assert words[-2:] == ["--data", "my corpus"]
    settings = [word for before, word in pairwise(words) if before == "--set"]
    made = apply_settings(get(words[2]), settings)
    assert set(differences(made, wanted)) == {"train.seed", "train.threads"}  # the threads are those of the runs
    assert made.train.threads == 1


def test_another_kind_is_set_before_its_fields(tmp_path):
    results = load(write_study(tmp_path, seeds=(1,)))
    wanted = apply_settings(get("paper/baseline"), ["model.key=bottleneck", "model.key.anchor=none"])
    line = single_run(*arm_of(results, wanted))
    assert line is not None
    assert line.startswith("qurve train paper/")
    assert line.index("model.key=bottleneck") < line.index("model.key.anchor=none")


def test_what_no_preset_is_near_has_no_line_of_its_own(tmp_path):
    results = load(write_study(tmp_path, seeds=(1,)))
    unknown = dataclasses.replace(results.arms[0], config={"model": {"query": {"kind": "from elsewhere"}}})
    assert single_run(results, unknown) is None
    far = {f"train.{k}": v for k, v in {"lr": 1.0, "min_lr": 0.5, "beta1": 0.1, "beta2": 0.2, "steps": 7}.items()}
    far |= {"train.grad_clip": 3.0, "train.weight_decay": 0.7, "model.d_model": 24, "model.n_heads": 3}
    far |= {"model.d_ff": 5, "model.n_layers": 9, "model.context": 7, "train.tokens_per_step": 49, "eval.every": 3}
    far |= {"eval.windows": 3, "train.warmup_steps": 1, "model.vocab_size": 300}
    wanted = apply_settings(get("smoke"), [f"{path}={value}" for path, value in far.items()])
    assert single_run(*arm_of(results, wanted)) is None
