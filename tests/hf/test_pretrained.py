"""A real pretrained Llama, retrofitted, imported and exported. `QURVE_PRETRAINED` names its folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from processes import environment
from qurve import hf
from qurve.generate import Sampling, generate, run_tokenizer
from qurve.hf.export import export, import_folder
from qurve.hf.part import parts
from qurve.model.gpt import GPT
from qurve.projections import Bottleneck

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

TEXT = "The President of the United States said that the people of this country would never forget what"


@pytest.fixture(scope="module")
def folder() -> Path:
    if "QURVE_PRETRAINED" not in os.environ:
        pytest.skip("no real model at hand: QURVE_PRETRAINED names the folder of a Llama (see CONTRIBUTING.md)")
    return Path(os.environ["QURVE_PRETRAINED"])


@pytest.fixture
def model(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def ids_1T(folder: Path) -> Tensor:
    ids: Tensor = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt")["input_ids"]
    return ids


@torch.no_grad()
def logits(model: nn.Module, ids_1T: Tensor) -> Tensor:
    found: Tensor = model(ids_1T).logits
    return found


CODE = """
import sys, torch
from qurve import hf
torch.set_num_threads(1)
with torch.no_grad():
    assert torch.equal(hf.load(sys.argv[1])(torch.load(sys.argv[2])).logits, torch.load(sys.argv[3]))
"""


def test_retrofit_saved_loaded_elsewhere_and_restored(model: LlamaForCausalLM, ids_1T: Tensor, tmp_path: Path) -> None:
    before, weights = logits(model, ids_1T), {name: p.clone() for name, p in model.state_dict().items()}
    report = hf.retrofit(model, Bottleneck(width=9))
    assert len(report.names) == model.config.num_hidden_layers
    assert report.logit_change == 0
    for part in parts(model).values():
        nn.init.normal_(part.post_gain, std=0.3)
    after = logits(model, ids_1T)
    assert (after - before).abs().max() > 0.1
    hf.save(model, tmp_path / "adapter")
    torch.save(ids_1T, tmp_path / "ids")
    torch.save(after, tmp_path / "after")
    told = [tmp_path / name for name in ("adapter", "ids", "after")]
    subprocess.run([sys.executable, "-c", CODE, *map(str, told)], env=environment(), check=True)
    hf.restore(model)
    assert torch.equal(logits(model, ids_1T), before)
    assert all(torch.equal(p, weights[name]) for name, p in model.state_dict().items())


def test_imported_and_exported_it_is_the_same_model(
    folder: Path, model: LlamaForCausalLM, ids_1T: Tensor, tmp_path: Path
) -> None:
    import_folder(folder, tmp_path / "run")
    own, expected = GPT.from_run(tmp_path / "run"), logits(model, ids_1T)
    with torch.no_grad():
        assert_close(own(ids_1T), expected, atol=1e-4, rtol=0)
    tokenizer = run_tokenizer(tmp_path / "run")
    assert tokenizer.encode_batch([TEXT])[0].tolist() == ids_1T[0].tolist()
    greedy = {"do_sample": False, "max_new_tokens": 50, "eos_token_id": None}
    made = model.generate(ids_1T, **greedy)[0, ids_1T.shape[1] :].tolist()
    (mine,) = generate(
        own, ids_1T.tolist(), tokenizer=tokenizer, sampling=Sampling(temperature=0), max_new_tokens=50, stop_ids=[]
    )
    assert list(mine.ids) == made
    for to in ("stock", "hf"):
        export(tmp_path / "run", tmp_path / to, to)  # type: ignore[arg-type]
        there = AutoModelForCausalLM.from_pretrained(tmp_path / to).eval()
        assert isinstance(there, LlamaForCausalLM) == (to == "stock")
        assert_close(logits(there, ids_1T), expected, atol=1e-4, rtol=0)
        assert there.generate(ids_1T, **greedy)[0, ids_1T.shape[1] :].tolist() == made
