"""The geometry of runs and studies from the command line: what is printed and left behind, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fake_study import BASELINE, arm, write_study

from qurve.analysis import conditioning
from qurve.cli.analyze.geometry import geometry
from qurve.data.loader import TokenData
from qurve.errors import BadInput
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


def test_every_checkpoint_is_measured_on_the_same_tokens(bent: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    first, last = document(capsys, bent.path, tokens=TOKENS, every_checkpoint=True)["checkpoints"]
    assert (first["step"], last["step"]) == (2, 4)
    assert first["layers"][0]["qkv"]["deviations"] != last["layers"][0]["qkv"]["deviations"]
    assert last == document(capsys, bent.path, tokens=TOKENS)["checkpoints"][0]


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
    assert spread["a"]["1"] < 1e-9 < spread["c"]["1"]
    for figure in ("jacobian_spread", "second_difference", "bent"):
        assert found["associations"][figure]["correlation"] > 0.9
    assert "2 finished arms" in found["associations"]["participation_ratio_of_f"]["why_none"]  # linear ones have no f
    assert geometry(tmp_path / "study", tokens=TOKENS, data=data_folder) == 0
    assert "jacobian spread and gain: correlation +0.9" in capsys.readouterr().out
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
    with pytest.raises(BadInput, match="holds no checkpoint"):
        geometry(tmp_path)
    write_study(
        tmp_path / "study", fates={(a, s): "missing" for a in ("baseline", "mlp-4.75", "res-gelu") for s in (1, 2, 3)}
    )
    with pytest.raises(BadInput, match="no finished run"):
        geometry(tmp_path / "study")
