from __future__ import annotations

import types

import pytest
import torch

from qurve.train import plan
from qurve.train.plan import matrix_peak


def test_peak_is_the_products_flops_over_the_best_time_with_the_threads_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = torch.get_num_threads()
    threads: list[int] = []
    times = iter([0.0, 0.1, 0.1, 0.4, 0.45, 0.45, 0.7, 0.8])  # of the two tries the second takes 0.25 s, the best

    def now() -> float:
        threads.append(torch.get_num_threads())
        return next(times)

    monkeypatch.setattr(plan, "time", types.SimpleNamespace(perf_counter=now))
    try:
        found = matrix_peak("cpu", "float32", before + 1)
        after = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
    assert found == pytest.approx(2 * 1024**3 / 0.25)  # a product of n x n matrices: n^3 multiplications, as many sums
    assert set(threads) == {before + 1}
    assert after == before
