"""lm-eval through the adapter, on task files of its own kind: no network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from commands import call, words
from qurve.errors import BadInput
from qurve.evaluate import Evaluated, evaluate_task, open_model, read_task
from qurve.runfolder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

CHOICES = """\
task: local_choices
custom_dataset: !function local.rows
test_split: test
output_type: multiple_choice
doc_to_text: context
doc_to_choice: choices
doc_to_target: label
target_delimiter: ""
metric_list:
  - metric: acc
  - metric: acc_bytes
"""
ROLLING = """\
task: local_text
custom_dataset: !function local.texts
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list:
  - metric: byte_perplexity
"""
MADE = """\
task: local_made
custom_dataset: !function local.texts
test_split: test
output_type: generate_until
doc_to_text: text
doc_to_target: text
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 4}
metric_list:
  - metric: exact_match
"""
ITEMS = [
    {"context": a, "choices": [f" {c}" for c in ("to", "peace", "a", "the")], "label": i % 4}
    for i, a in enumerate(("Fellow", "Of", "The", "I am", "We", "No one"))
]
TEXTS = ["Fellow-Citizens of the Senate", "I embrace"]


@pytest.fixture
def tasks(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "local.py").write_text(
        f"import datasets\n\ndef rows(**_):\n    return {{'test': datasets.Dataset.from_list({ITEMS!r})}}\n\n"
        f"def texts(**_):\n    return {{'test': datasets.Dataset.from_list([{{'text': t}} for t in {TEXTS!r}])}}\n"
    )
    files = {"choices": CHOICES, "text": ROLLING, "made": MADE}
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return {name: str(tmp_path / f"{name}.yaml") for name in files}


def test_the_adapter_has_the_built_in_numbers_for_every_batch(
    ours: Evaluated, hugging_face: dict[str, Path], tasks: dict[str, str], task_file: Callable[..., Path]
):
    pytest.importorskip("lm_eval")
    from qurve.evaluate.harness import run_harness
    from qurve.evaluate.loss import text_loss

    for model in (ours, open_model(hugging_face["llama"], device="cpu")):
        built_in = evaluate_task(model, read_task(task_file(ITEMS)))
        loss = text_loss(model, TEXTS)
        for batch_size in (1, 5):
            found = run_harness(model, [tasks["choices"], tasks["text"]], batch_size=batch_size)
            assert found["local_choices"]["acc,none"] == pytest.approx(built_in.accuracy)
            assert found["local_choices"]["acc_bytes,none"] == pytest.approx(built_in.accuracy_norm)
            perplexity = found["local_text"]["byte_perplexity,none"]
            assert perplexity == pytest.approx(2**loss.bits_per_byte, rel=1e-5)
    made = run_harness(ours, [tasks["made"]], limit=1)
    assert made["local_made"]["exact_match,none"] == 0


def test_the_command_and_what_it_cannot_get(undisturbed: RunFolder, tasks: dict[str, str]):
    pytest.importorskip("lm_eval")
    told = call("eval", undisturbed.path, "--tasks", tasks["choices"], "--limit", 2, "--json")
    assert told.code == 0
    assert told.json["lm_eval"]["local_choices"]["sample_len"] == 2
    refused = call("eval", undisturbed.path, "--tasks", "none.yaml")
    assert (refused.code, "none.yaml does not exist" in words(refused.err)) == (2, True)


def test_a_prompt_keeps_half_of_the_context(ours: Evaluated, monkeypatch: pytest.MonkeyPatch):
    """A task that names no length is given one that small models do not have."""
    pytest.importorskip("lm_eval")
    from types import SimpleNamespace

    from qurve.evaluate.harness import HarnessModel

    asked: list[tuple[bytes, int]] = []
    monkeypatch.setattr(ours, "continued", lambda ids, most, stop: asked.append((bytes(ids), most)) or "")
    prompts = (("a prompt of the length of thirty-six", {}), ("short", {}), ("short", {"max_gen_toks": 3}))
    HarnessModel(ours).generate_until([SimpleNamespace(args=args) for args in prompts])
    assert ours.context == 16
    assert asked == [(b"f thirty-six"[-8:], 8), (b"short", 11), (b"short", 3)]


def test_a_task_that_wants_to_draw_is_refused(ours: Evaluated):
    pytest.importorskip("lm_eval")
    from types import SimpleNamespace

    from qurve.evaluate.harness import HarnessModel

    model = HarnessModel(ours)
    ask = lambda **wanted: [SimpleNamespace(args=("To the", wanted))]  # noqa: E731
    assert len(model.generate_until(ask(until=[], max_gen_toks=3))[0]) <= 3
    with pytest.raises(BadInput, match="wants text to be drawn"):
        model.generate_until(ask(do_sample=True))
