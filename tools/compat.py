"""`make test-compat`: the tests of the Hugging Face part, with the oldest transformers that `pyproject.toml` allows.

It is installed into `.compat/`, without its dependencies, and goes before the environment's own, which stays as it is.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ("tests/hf", "tests/evaluate", "tests/cli/test_evaluating.py")
WHICH = "import transformers; print(transformers.__version__, transformers.__file__)"


def oldest(package: str) -> str:
    """The lower bound of a package of the extra `hf`, as `pyproject.toml` states it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (requirement,) = (r for r in project["optional-dependencies"]["hf"] if re.split(r"\W", r)[0] == package)
    bound: str = requirement.partition(">=")[2]
    return bound


def main(arguments: list[str]) -> int:
    bound = oldest("transformers")
    folder = ROOT / ".compat" / f"transformers-{bound}"
    if not (folder / "transformers" / "__init__.py").exists():
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
        if subprocess.call([*pip, "--target", str(folder), f"transformers=={bound}"]) != 0:
            print(f"pip could not install transformers {bound}; what it says stands above", file=sys.stderr)
            return 1
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "src")])}
    found = subprocess.run([sys.executable, "-c", WHICH], env=environment, capture_output=True, text=True)
    version, _, where = found.stdout.strip().partition(" ")
    if found.returncode or not where.startswith(str(folder)):
        print(f"transformers {bound} does not work here: {found.stderr or found.stdout}", file=sys.stderr)
        return 1
    print(f"with transformers {version}")
    tests = [sys.executable, "-m", "pytest", "-n", "2", "-m", "not slow", *TESTS, *arguments]
    return subprocess.call(tests, cwd=ROOT, env=environment)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
