"""The geometry of runs and studies from the command line: what is printed and left behind, and what is refused."""

from __future__ import annotations

import gc
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_study import BASELINE, arm, write_study

from qurve.analysis import conditioning
from qurve.analysis.hull import HullMeter, measure_hulls
from qurve.analysis.pathways import Block
from qurve.cli.analyze import geometry as analyze_geometry
from qurve.cli.analyze.geometry import geometry
from qurve.data.loader import TokenData
from qurve.data.order import fixed_eval_windows
from qurve.errors import BadInput
from qurve.generate.text import run_data
from qurve.model.config import ModelConfig
from qurve.model.gpt import GPT
from qurve.runfolder import RunFolder
from tiny import tiny

TOKENS = 400


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jacobians of four tokens."""
    monkeypatch.setattr(conditioning, "MOST_ROWS", 4 * 32)


@pytest.fixture(scope="module")
def bent(data: TokenData, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run with nonlinear queries and two checkpoints."""
    from qurve.train.loop import train

    config = tiny("model.query=bottleneck", f"data.path={data.folder}")
    return train(config, tmp_path_factory.mktemp("runs") / "bent", data)


def document(capsys: pytest.CaptureFixture[str], *arguments: Any, **options: Any) -> Any:
    assert geometry(*arguments, as_json=True, **options) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_tells_its_bounds_spectra_curvature_and_condition(
    bent: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = document(capsys, bent.path, tokens=TOKENS, out=tmp_path / "new" / "out")
    (checkpoint,) = found["checkpoints"]
    assert (checkpoint["step"], checkpoint["tokens"], checkpoint["tolerance"]) == (4, 416, 1e-6)  # whole windows
    assert [layer["layer"] for layer in checkpoint["layers"]] == [0, 1]
    for layer in checkpoint["layers"]:
        assert layer["bound"] == {"ambient": 96, "paper": 64, "tight": 47, "flat": 31}
        assert layer["qkv"]["rank"] == 47
        assert len(layer["qkv"]["deviations"]) == 96
        assert (layer["input"]["rank"], layer["query"]["rank"], layer["f"]["query"]["rank"]) == (31, 32, 16)
        assert 0 < layer["bent"] < 1
        assert layer["curvature"]["query"]["jacobian_spread"] > 1e-3
        assert layer["curvature"]["value"]["jacobian_spread"] < 1e-9
        assert layer["condition"]["attention"]["tokens"] == 4
        assert layer["condition"]["mlp"]["with_skip"] > 1
    assert json.loads((tmp_path / "new" / "out" / "geometry.json").read_text()) == found
    page = (tmp_path / "new" / "out" / "geometry.html").read_text()
    assert 'data-plot="spectra"' in page
    assert "Condition numbers" in page
    assert "</svg>" in (tmp_path / "new" / "out" / "spectra.svg").read_text()


def test_every_checkpoint_is_measured_on_the_same_tokens(
    bent: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = document(capsys, bent.path, tokens=TOKENS, every_checkpoint=True, out=tmp_path)["checkpoints"]
    assert [checkpoint["step"] for checkpoint in found] == [0, 2, 4]
    assert len({tuple(checkpoint["layers"][0]["qkv"]["deviations"]) for checkpoint in found}) == 3
    assert found[-1] == document(capsys, bent.path, tokens=TOKENS)["checkpoints"][0]
    assert '<figure id="training"' in (tmp_path / "geometry.html").read_text()
    assert "</svg>" in (tmp_path / "training.svg").read_text()


def test_step_0_is_the_model_before_training(bent: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, bent.path, tokens=TOKENS, every_checkpoint=True)["checkpoints"][0]
    split = run_data(bent.path).split("val")
    ids_BT = torch.from_numpy(split.windows(fixed_eval_windows(len(split), context=32, count=13), 32)[0])
    for layer, hull in zip(found["layers"], measure_hulls(GPT(bent_config(bent), seed=1), [ids_BT]), strict=True):
        assert layer["bent"] == pytest.approx(hull.bent)
        assert layer["qkv"]["deviations"] == pytest.approx(hull.qkv.deviations, rel=1e-4, abs=1e-9)


def bent_config(run: RunFolder) -> ModelConfig:
    return GPT.from_run(run.path).config


def test_without_its_start_the_checkpoints_are_measured(
    bent: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder of a run that went on with another seed does not tell the first."""
    shutil.copytree(bent.path, tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    run.add_to_environment({"resumed": [{"step": 2, "changed": {"train.seed": [7, 1]}, "earlier_hash": "0"}]})
    assert geometry(run.path, tokens=TOKENS, every_checkpoint=True, as_json=True) == 0
    printed = capsys.readouterr()
    assert "no step 0" in printed.err
    assert [checkpoint["step"] for checkpoint in json.loads(printed.out)["checkpoints"]] == [2, 4]


def test_memory_does_not_grow_with_the_tokens(bent: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held while the last pass is measured is the same after few and after many passes."""
    monkeypatch.setattr(analyze_geometry, "PASS_TOKENS", 64)
    held: list[int] = []
    see = HullMeter.see

    def seen(meter: HullMeter, layer: int, block: Block) -> None:
        see(meter, layer, block)
        if layer == 1:
            kinds = (torch.Tensor, torch.nn.Parameter)  # no fakes, which others' compiling may have left
            tensors = [one for one in gc.get_objects() if type(one) in kinds]
            held.append(sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()))

    monkeypatch.setattr(HullMeter, "see", seen)
    few, many = (held_by(bent, tokens, held) for tokens in (4 * 64, 24 * 64))
    assert (len(few), len(many)) == (4, 24)
    assert few[-1] == many[-1]


def held_by(run: RunFolder, tokens: int, held: list[int]) -> list[int]:
    held.clear()
    gc.collect()
    assert geometry(run.path, tokens=tokens) == 0
    return list(held)


def test_people_read_tables(
    bent: RunFolder, finished: RunFolder, data_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert geometry(bent.path, tokens=TOKENS, every_checkpoint=True) == 0
    told = capsys.readouterr().out
    assert all(title in told for title in ("Affine hull", "Curvature", "Condition numbers", "Over training"))
    assert "0 query" in told
    assert "0 value" not in told
    assert geometry(finished.path, tokens=TOKENS, data=data_folder) == 0
    told = capsys.readouterr().out
    assert "Every pathway is linear" in " ".join(told.split())
    assert not re.search(r"\de-1\d", told), "what bends by rounding does not bend"
    assert "Over training" not in told


def test_a_study_tells_what_goes_with_its_gains(
    bent: RunFolder, finished: RunFolder, data_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two arms with nonlinear queries, which gain; two linear ones, which hardly do."""
    gains = {"a": 0.01, "b": 0.02, "c": 0.06, "d": 0.07}
    arms = {BASELINE["name"]: BASELINE, **{n: arm(n, n.upper(), g) for n, g in gains.items()}}
    sources = {name: bent if name in "cd" else finished for name in arms}
    own = [{**one, "config": sources[name].config_json()[0]} for name, one in arms.items()]
    write_study(tmp_path / "study", tuple(own), seeds=(1,))
    for name, source in sources.items():
        folder = tmp_path / "study" / "runs" / name / "seed-1"
        (folder / "config.json").write_text(source.config_file.read_text())
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        (folder / "checkpoints").symlink_to(source.checkpoints)
    found = document(capsys, tmp_path / "study", tokens=TOKENS, data=data_folder)
    spread = found["figures"]["jacobian_spread"]
    assert list(spread) == ["baseline", "a", "b", "c", "d"]
    assert spread["c"]["1"] > 1e-3
    for figure in ("jacobian_spread", "second_difference", "bent"):  # what is rounding is no figure to go by
        assert [found["figures"][figure][name]["1"] for name in "ab"] == [0.0, 0.0]
    for figure in ("jacobian_spread", "second_difference", "bent"):
        assert found["associations"][figure]["correlation"] > 0.9
    assert "there are 2" in found["associations"]["participation_ratio_of_f"]["why_none"]  # linear ones have no f
    out = tmp_path / "study" / "analysis"
    assert geometry(tmp_path / "study", tokens=TOKENS, data=data_folder, out=out) == 0
    told = capsys.readouterr().out
    assert re.search(r"^arm +bent +PR +2nd difference +Jacobian spread +PR of f +gain %", told, flags=re.MULTILINE)
    assert re.search(r"^Jacobian spread +4 +\+(0\.9\d|1\.00) +0\.", told, flags=re.MULTILINE)
    assert sorted(file.name for file in out.iterdir()) == ["gains.svg", "geometry.html", "geometry.json"]
    assert json.loads((out / "geometry.json").read_text()) == found
    with pytest.raises(BadInput, match="is for a run"):
        geometry(tmp_path / "study", every_checkpoint=True)


def test_what_cannot_be_measured_is_refused(
    bent: RunFolder, finished: RunFolder, tmp_path: Path, data_folder: Path
) -> None:
    with pytest.raises(BadInput, match="--tokens 0: it must be at least 1"):
        geometry(bent.path, tokens=0)
    with pytest.raises(BadInput, match="32 tokens span at most 31 dimensions"):
        geometry(bent.path, tokens=5)
    with pytest.raises(BadInput, match=r"is no prepared data"):
        geometry(bent.path, data=tmp_path)
    with pytest.raises(BadInput, match="is not a run folder"):
        geometry(tmp_path)
    write_study(
        tmp_path / "study", fates={(a, s): "missing" for a in ("baseline", "mlp-4.75", "res-gelu") for s in (1, 2, 3)}
    )
    with pytest.raises(BadInput, match="no finished run"):
        geometry(tmp_path / "study")
