from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard
from torch import Tensor

from qurve.errors import BadInput
from qurve.evaluate import Evaluated, evaluate_task, open_model, read_task
from qurve.evaluate.tasks import as_requests, wilson_interval


class Liking(Evaluated):
    """Bytes; after any token the byte `x` has the logit 3, every other one 0: likelihoods can be said beforehand."""

    name, context, n_ids, end = "liking", 32, 257, 256

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def logits(self, ids_BT: Tensor, lengths_B: Tensor, first: int) -> Tensor:
        logits = torch.zeros(*ids_BT.shape, 257)
        logits[..., ord("x")] = 3
        return logits[:, first:]

    def continued(self, ids: Sequence[int], max_new_tokens: int, stop: Sequence[str]) -> str:
        return "x" * max_new_tokens


def test_choices_are_judged_plainly_and_by_length(task_file: Callable[..., Path]):
    # "ab" is two tokens of nats -5.6 each; "xxxxxxxx" is eight of -2.6: less likely whole, likelier by the byte
    task = read_task(
        task_file(
            [
                {"context": "Q:", "choices": ["ab", "xxxxxxxx"], "label": 0},
                {"context": "Q:", "choices": ["ab", "xxxxxxxx"], "label": 1},
                {"context": "Q:", "choices": ["b", "x", "ä"], "label": 1, "id": "ignored"},
                {"context": "Q:", "choices": ["aa", "bb"], "label": 0},  # alike: the first counts
            ]
        )
    )
    found = evaluate_task(Liking(), task, batch_size=3)
    assert found.correct == (True, False, True, True)
    assert found.correct_norm == (False, True, True, True)
    assert (found.accuracy, found.accuracy_norm, found.perplexity, found.cut) == (0.75, 0.75, None, 0)
    assert found.chance == pytest.approx((1 / 2 + 1 / 2 + 1 / 3 + 1 / 2) / 4)
    assert found.interval == wilson_interval(3, 4)


def test_length_is_counted_in_bytes(task_file: Callable[..., Path]):
    class Pairs(Liking):
        def encode(self, texts: Sequence[str]) -> list[list[int]]:
            return [[200] if text == "xb" else list(text.encode()) for text in texts]

    # -5.6 nats a token, -2.6 for `x`. "äx" has -13.8 in 3 bytes, but 2 signs; "aa" has -11.2 in 2
    said = {"context": "", "choices": ["aa", "äx"], "label": 1}
    assert evaluate_task(Liking(), read_task(task_file([said]))).correct_norm == (True,)
    # "xb" has -5.6 in 2 bytes, but one token; "xa" has -8.2 in two
    said = {"context": "", "choices": ["aa", "xb", "xa"], "label": 1}
    assert evaluate_task(Pairs(), read_task(task_file([said]))).correct_norm == (True,)


def test_contexts_of_their_own_and_targets(task_file: Callable[..., Path], ours: Evaluated):
    items = [{"contexts": ["He said", "She"], "choices": [" no", " no"], "label": 1}]
    found = evaluate_task(ours, read_task(task_file(items)))
    a, b = (evaluate_task(ours, read_task(task_file([{"context": c, "target": " no"}]))) for c in ("He said", "She"))
    assert a.perplexity is not None
    assert b.perplexity is not None
    assert a.perplexity != b.perplexity
    assert found.correct == (b.perplexity < a.perplexity,)
    targets = [{"context": "Q:", "target": "xx"}, {"context": "Q:", "target": "xy"}, {"context": "", "target": "x"}]
    said = evaluate_task(Liking(), read_task(task_file(targets)))
    assert said.correct == (True, False, True)
    assert (said.correct_norm, said.accuracy_norm, said.interval_norm, said.chance) == (None, None, None, None)
    nats = torch.tensor([3.0] + [0.0] * 256).logsumexp(0).item()
    assert said.perplexity == pytest.approx(torch.tensor((5 * nats - 4 * 3) / 5).exp().item(), rel=1e-5)


def test_batches_do_not_change_what_is_found(task_file: Callable[..., Path], hugging_face: dict[str, Path]):
    words = ["to", "a", "war", "the peopled states"]
    items = [
        {"context": f"{a} {b}", "choices": [f" {c}" for c in words if c != a], "label": 1} for a in words for b in words
    ]
    model, task = open_model(hugging_face["llama"], device="cpu"), read_task(task_file(items))
    one, many = (evaluate_task(model, task, batch_size=size) for size in (1, 64))
    assert (one.correct, one.correct_norm) == (many.correct, many.correct_norm)
    assert 0 < one.cut == many.cut < len(items)


def test_the_border_falls_as_in_running_text(hugging_face: dict[str, Path]):
    model = Liking()
    moved, empty, white = as_requests(model, [("ab ", "c"), ("", "c"), ("  ", "c")])
    assert (bytes(moved.context), bytes(moved.continuation)) == (b"ab", b" c")
    assert (empty.context, white.context) == ([256], [256])
    assert (bytes(empty.continuation), bytes(white.continuation)) == (b"c", b"  c")
    llama = open_model(hugging_face["llama"], device="cpu")
    assert [request.context[0] for request in as_requests(llama, [("ab", "c"), ("", "c")])] == [257, 257]

    class Merging(Liking):
        def encode(self, texts: Sequence[str]) -> list[list[int]]:
            return [[200] if text == "ab" else list(text.encode()) for text in texts]

    (merged,) = as_requests(Merging(), [("a", "b")])
    assert (merged.context, merged.continuation) == ([97], [98])


def test_intervals_are_wilsons():
    assert wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)  # Wilson 1927; Agresti and Coull 1998
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson_interval(10, 10)[1] == 1


def test_packed_files_and_limits(task_file: Callable[..., Path], tmp_path: Path):
    items = [{"context": "a", "target": t} for t in "bcd"]
    text = "".join(json.dumps(item) + "\n" for item in items).encode()
    (tmp_path / "a.b.jsonl.gz").write_bytes(gzip.compress(text))
    (tmp_path / "a.b.jsonl.zst").write_bytes(zstandard.compress(text))
    plain = read_task(task_file(items, "a.b.jsonl"))
    packed = [read_task(tmp_path / f"a.b.jsonl.{end}") for end in ("gz", "zst")]
    assert [plain, plain] == packed
    assert plain.name == "a.b"
    first = read_task(tmp_path / "a.b.jsonl", limit=2)
    assert len(first.items) == 2
    assert first.sha256 != plain.sha256


GOOD = {"context": "a", "choices": ["b", "c"], "label": 0}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"context": "a"}, "'choices' must be two or more texts, none empty; it has the fields context"),
        ({**GOOD, "choices": ["b"]}, "two or more texts"),
        ({**GOOD, "choices": ["b", ""]}, "none empty"),
        ({**GOOD, "label": 2}, "'label' is 2; it must be the place of the right choice, 0 to 1"),
        ({**GOOD, "label": True}, "'label' is True"),
        ({**GOOD, "contexts": ["a"]}, "one text for each of the choices"),
        ({**GOOD, "context": None}, "it needs a text 'context'"),
        ({"context": "a", "target": ""}, "'context' and 'target' must be texts"),
        ({"context": "a", "target": "b"}, "the first line has choices, this not"),
        ([1], "not a JSON object"),
    ],
)
def test_a_line_that_is_no_item_is_named(line: Any, said: str, task_file: Callable[..., Path]):
    with pytest.raises(BadInput, match=rf"task.jsonl, line 2: .*{said}"):
        read_task(task_file([GOOD, line]))


def test_files_that_are_no_task(task_file: Callable[..., Path], tmp_path: Path):
    with pytest.raises(BadInput, match="holds no item"):
        read_task(task_file([]))
    with pytest.raises(BadInput, match=r"none.jsonl does not exist"):
        read_task(tmp_path / "none.jsonl")
    (tmp_path / "task.csv").touch()
    with pytest.raises(BadInput, match=r"task.csv is no file ending in .jsonl"):
        read_task(tmp_path / "task.csv")
    with pytest.raises(BadInput, match=r"task: 'bbbbbbbb.*… has 40 tokens, more than the context of liking, 32"):
        evaluate_task(Liking(), read_task(task_file([{**GOOD, "choices": ["b" * 40, "c"]}])))
