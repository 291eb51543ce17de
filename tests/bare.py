"""A Python in which torch, numpy, safetensors and what torch needs are all there is: that of a bare GPU machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ALLOWED = ["torch", "numpy", "safetensors", "triton", "qurve"]
TORCHS = ["torchgen", "functorch", "filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "setuptools"]
TORCHS += ["sympy", "typing_extensions", "packaging"]  # the last to compile for a CPU alone
PROGRAM = f"""
import runpy, sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path

class Bare:
    def find_spec(self, name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target)
        foreign = path is None and "site-packages" in repr(spec) and name not in {ALLOWED + TORCHS}
        # what setuptools brings along is there, whether or not the same package is installed beside it
        return PathFinder.find_spec(name, [place for place in sys.path if "_vendor" in place]) if foreign else spec

sys.meta_path[:] = [BuiltinImporter, FrozenImporter, Bare()]
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python SCRIPT ARGUMENTS` there."""
    return subprocess.run([sys.executable, "-c", PROGRAM, str(script), *arguments], capture_output=True, text=True)
