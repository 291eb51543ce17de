"""Where the packages of the extra `hf` are missing: what needs none of them works, the rest says what to install."""

from __future__ import annotations

import subprocess
import sys

from processes import environment

CODE = """
import sys
sys.modules.update(dict.fromkeys(("transformers", "peft", "datasets", "lm_eval")))  # None: as if they were not there
from torch import nn
from qurve import hf
from qurve.cli import _run_command
from qurve.errors import BadInput
model = nn.Sequential(nn.Linear(4, 4))
print(hf.retrofit(model, path="0").added)
for name in ("QurveForCausalLM", "NonlinearQueryConfig"):
    try:
        getattr(hf, name)
    except BadInput as error:
        print(error)
print(_run_command(["import", "somewhere", "--out", "elsewhere"]))
"""


def test_retrofitting_works_and_the_rest_names_the_extra() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], env=environment(), capture_output=True, text=True, check=True)
    added, model, method, code = done.stdout.splitlines()
    assert added == str(2 * 4 * 2 + 4 + 4)
    assert model.startswith("qurve.hf.QurveForCausalLM needs the extra hf")
    for said in (model, method, " ".join(done.stderr.split())):
        assert "pip install 'qurve[hf]'" in said
    assert code == "2"
