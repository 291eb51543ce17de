"""A projection from outside of the package: the guide's own code, through commands, worker processes and files."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from processes import environment
from qurve.config import from_json, to_json
from qurve.errors import BadInput
from qurve.model.config import ModelConfig
from qurve.model.gpt import GPT
from qurve.plugins import VARIABLE
from qurve.projections import ProjectionConfig
from qurve.runfolder import RunFolder
from qurve.study.definition import load_study
from qurve.study.report import write_report

ROOT = Path(__file__).parents[2]
SMALLER = {
    "model": "n_layers=1 d_model=12 n_heads=2 d_ff=24 context=16 vocab_size=320",
    "train": "tokens_per_step=64 micro_batch=4 precision=float32",
    "eval": "windows=2 every=3",
}
SETTINGS = [part for group, texts in SMALLER.items() for text in texts.split() for part in ("--set", f"{group}.{text}")]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The guide's two files in one folder. What they register is forgotten afterwards."""
    before, path, modules = dict(ProjectionConfig.registry), list(sys.path), set(sys.modules)
    blocks = re.findall(r"```python\n(# (\w+\.py)\n.*?)```", (ROOT / "docs/new-projection.md").read_text(), re.DOTALL)
    assert [name for _, name in blocks] == ["gated_query.py", "my_study.py"]
    for text, name in blocks:
        (tmp_path / name).write_text(text)
    yield tmp_path
    ProjectionConfig.registry.clear()
    ProjectionConfig.registry.update(before)
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def plugin(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(folder / "gated_query.py"))
    return folder


def qurve(*arguments: str, cwd: Path, **variables: str) -> None:
    command = [sys.executable, "-m", "qurve", *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment(**variables), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_guides_study_is_trained_in_worker_processes(
    folder: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    options = ["--data", str(data_folder), "--seeds", "1", "--steps", "3", "--workers", "1", "--device", "cpu"]
    qurve("compare", str(folder / "my_study.py"), "--out", "study", *options, *SETTINGS, cwd=elsewhere)
    runs = {name: RunFolder(elsewhere / f"study/runs/{name}/seed-1") for name in ("paper", "gated")}
    assert [run.status()["status"] for run in runs.values()] == ["finished", "finished"]
    assert runs["gated"].config_json()[0]["model"]["query"] == {"kind": "gated_query", "width": None}
    assert "Gated bottleneck" in write_report(elsewhere / "study").read_text()  # without the kind

    with pytest.raises(BadInput, match=r"model\.query\.kind = 'gated_query' is unknown"):
        GPT.from_run(runs["gated"].path)
    monkeypatch.setenv(VARIABLE, str(folder / "gated_query.py"))
    model = GPT.from_run(runs["gated"].path)
    ids_BT = torch.arange(13)[None]
    assert torch.isfinite(model(ids_BT)).all()
    names = {name.rpartition(".")[2] for name, _ in model.named_parameters() if ".query." in name}
    assert names == {"w1", "w2", "w3", "gain"}


@pytest.mark.slow
def test_a_run_of_it_is_continued(plugin: Path, data_folder: Path) -> None:
    options = ["--set", "model.query=gated_query", "--data", str(data_folder), "--device", "cpu", "--out", "run"]
    command = ["train", "smoke", *options, *SETTINGS, "--steps", "6"]
    qurve(*command, "--stop-at", "3", cwd=plugin, QURVE_PLUGINS="gated_query.py")
    qurve(*command, "--resume", "auto", cwd=plugin, QURVE_PLUGINS="gated_query.py")
    assert RunFolder(plugin / "run").last_step() == 6


@pytest.mark.slow
def test_it_keeps_the_contract(plugin: Path) -> None:
    command = [sys.executable, "-m", "pytest", "tests/projections/test_contract.py", "-k", "gated_query"]
    variables = environment(QURVE_PLUGINS=str(plugin / "gated_query.py"))
    done = subprocess.run([*command, "-p", "no:cacheprovider"], cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert len(re.findall(r"\.", done.stdout.splitlines()[0])) > 20


def test_a_configuration_of_it_goes_through_json(plugin: Path) -> None:
    tree = '{"format": 1, "d_model": 12, "n_heads": 2, "query": {"kind": "gated_query", "width": 5}}'
    config = from_json(ModelConfig, tree)
    assert type(config.query).__module__ == "gated_query"
    assert from_json(ModelConfig, to_json(config)) == config
    with pytest.raises(BadInput, match=r"model\.query: gated_query adds 12 channels to 8; use 'linear' here"):
        from_json(ModelConfig, tree.replace('"n_heads"', '"d_head": 4, "n_heads"'))


def test_it_computes_the_documented_formula(plugin: Path) -> None:
    config = from_json(ModelConfig, '{"format": 1, "d_model": 12, "n_heads": 2, "query": {"kind": "gated_query"}}')
    x_BTD = torch.randn(2, 7, 12)
    module = config.query.build(12, 12)
    h_BTR = torch.nn.functional.gelu(x_BTD @ module.w1.T) * (x_BTD @ module.w3.T)
    f_BTD = torch.nn.functional.layer_norm(h_BTR @ module.w2.T, (12,), eps=1e-8)
    torch.testing.assert_close(module(x_BTD), (x_BTD + f_BTD) / 2)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("exiting.py", "import sys\nsys.exit(3)", r"exiting\.py cannot be run: SystemExit: 3"),
        ("missing.py", None, r"QURVE_PLUGINS: there is no Python file .*missing\.py"),
        ("notes.txt", "", r"there is no Python file .*notes\.txt"),
        ("broken.py", "1 / 0", r"broken\.py cannot be run: ZeroDivisionError: division by zero"),
        ("json.py", "", r"json\.py has the name of another module \(.*json.__init__\.py\); rename it"),
    ],
)
def test_a_file_that_cannot_be_imported_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str | None, message: str
) -> None:
    if text is not None:
        (folder / name).write_text(text)
    monkeypatch.setenv(VARIABLE, str(folder / name))
    with pytest.raises(BadInput, match=message):
        from_json(ModelConfig, '{"format": 1, "query": {"kind": "gated_query"}}')


def test_of_two_files_of_one_name_the_one_that_is_given_is_imported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = '{"format": 1, "d_model": 12, "n_heads": 2, "query": {"kind": "gated_query"}}'
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "gated_query.py").write_text("raise RuntimeError('the wrong one')")
    (elsewhere / "study.py").write_text("STUDY = 1")
    for file in (elsewhere / "study.py", folder / "my_study.py", elsewhere / "study.py"):  # both are on the path now
        with contextlib.suppress(BadInput):
            load_study(str(file))
    wrong, right = elsewhere / "gated_query.py", folder / "gated_query.py"
    registered = dict(ProjectionConfig.registry)
    del sys.modules["gated_query"], ProjectionConfig.registry["gated_query"]
    assert registered.keys() - ProjectionConfig.registry.keys() == {"gated_query"}
    monkeypatch.setenv(VARIABLE, str(right))
    config = from_json(ModelConfig, tree)
    assert sys.modules[type(config.query).__module__].__file__ == str(right)

    del ProjectionConfig.registry["gated_query"]
    monkeypatch.setenv(VARIABLE, str(wrong))  # the name is taken
    with pytest.raises(BadInput, match=r"elsewhere/gated_query\.py has the name of another module .*; rename it"):
        from_json(ModelConfig, tree)


def test_a_kind_that_a_study_file_defines_itself_is_refused(folder: Path) -> None:
    kind, study = ((folder / name).read_text() for name in ("gated_query.py", "my_study.py"))
    (folder / "both.py").write_text(kind + study.replace("from gated_query import GatedQuery", ""))
    with pytest.raises(BadInput, match="define a kind of your own in a file beside the study"):
        load_study(str(folder / "both.py"))
