from __future__ import annotations

import argparse

import absorbed
import pytest

SHAPE = {"layers": 2, "width": 16, "heads": 2, "context": 32, "vocab": 64, "new": 2, "rounds": 1, "threads": 1}


@pytest.mark.parametrize(("topology", "sides"), [("skipless", 3), ("attention", 2)])
def test_the_same_logits_with_so_many_fewer_parameters(topology: str, sides: int) -> None:
    report = absorbed.measure(argparse.Namespace(**SHAPE, topology=topology, compile=False))
    found = list(report["sides"].values())
    assert [found[0]["parameters"] - side["parameters"] for side in found] == [n * 2 * 16 * 16 for n in range(sides)]
    assert all(side["difference_float64"] < 1e-10 and side["difference_float32"] < 1e-2 for side in found)
    assert all(side["step_s"]["median"] > 0 for side in found)


def test_what_computes_something_else_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absorbed, "EXACT", -1.0)
    with pytest.raises(SystemExit, match="nothing is timed"):
        absorbed.measure(argparse.Namespace(**SHAPE, topology="attention", compile=False))
