from __future__ import annotations

import argparse
from pathlib import Path

import loader_cpu
import pytest
from loader_cpu import measure, training_rate

SHAPE = {"context": 8, "tokens_per_step": 32, "micro_batch": 2, "steps": 2}


@pytest.mark.parametrize("order", ["epochs", "paper"])
def test_batches_are_the_files_and_others_are_noticed(tmp_path: Path, order: str) -> None:
    tokens = loader_cpu._write(tmp_path, 10_000)
    found = measure(tmp_path, tokens, SHAPE, order, "cold", argparse.Namespace(rounds=2))
    assert found["tokens_per_s"]["low"] > 0
    with pytest.raises(SystemExit, match="is not the file's"):
        measure(tmp_path, tokens + 1, SHAPE, order, "warm", argparse.Namespace(rounds=1))


def test_rate_is_that_of_our_fastest_training() -> None:
    assert training_rate({"tokens_per_s": {"linear": 3.0, "nonlinear": 4.0, "nanogpt": 9.0}}) == 4.0
