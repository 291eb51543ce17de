"""Whether the arms of a study saw the same batches: what each run recorded of them, compared step by step."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qurve.study.results import Run, StudyResults


@dataclass(frozen=True)
class SeedBatches:
    """What the runs of one seed saw. `difference` says where two of them part, None where they never do."""

    seed: int
    arms: tuple[str, ...]
    steps: int
    """Training lines compared: those up to where the shortest of the runs has come."""
    digest: str
    """sha256 over the compared lines' batch digests; empty where nothing could be compared."""
    difference: str | None
    differing: frozenset[str]
    """Arms that part from the baseline (or from the first arm that has a run)."""


@dataclass(frozen=True)
class BatchProof:
    seeds: tuple[SeedBatches, ...]
    arms: int
    """How many arms the study has."""

    @property
    def identical(self) -> bool:
        """Every seed has at least two runs to compare, and they agree at every step."""
        return bool(self.seeds) and all(seed.steps > 0 and seed.difference is None for seed in self.seeds)

    @property
    def complete(self) -> bool:
        """Identical, and no arm's run is missing for any seed."""
        return self.identical and all(len(seed.arms) == self.arms for seed in self.seeds)

    @property
    def differences(self) -> list[str]:
        return [seed.difference for seed in self.seeds if seed.difference is not None]

    def difference_of(self, arm: str, baseline: str) -> str | None:
        """Why `arm` cannot be paired with `baseline`; None when nothing speaks against it."""
        for seed in self.seeds:
            if arm in seed.differing or (baseline in seed.differing and arm in seed.arms):
                return seed.difference
        return None


def identical_batches(results: StudyResults) -> BatchProof:
    """For every seed: did all arms train on the same windows of the same data, at every step?

    A step that one run recorded and another passed over is a difference too: it was not shown to be the same.
    """
    return BatchProof(tuple(_seed_batches(results, seed) for seed in results.seeds), len(results.arms))


def _seed_batches(results: StudyResults, seed: int) -> SeedBatches:
    order = [results.baseline, *results.others]
    runs = [run for arm in order if (run := arm.runs[seed]).train or run.batch_digests]
    names = tuple(run.arm for run in runs)
    if len(runs) < 2:
        return SeedBatches(seed, names, 0, "", None, frozenset())
    reference, found, differing = runs[0], None, set()
    for run in runs[1:]:
        step = _first_difference(reference, run)
        if step is not None:
            differing.add(run.arm)
            found = found or f"seed {seed}: {reference.arm} and {run.arm} did not see the same batch at step {step:,}"
    last = min(run.step for run in runs)
    shared = [digest for step, digest in reference.batch_digests.items() if step <= last]
    digest = hashlib.sha256("\n".join(shared).encode()).hexdigest()
    return SeedBatches(seed, names, len(shared), digest, found, frozenset(differing))


def _first_difference(a: Run, b: Run) -> int | None:
    last = min(a.step, b.step)
    of_other_data = bool(a.fingerprint and b.fingerprint) and a.fingerprint != b.fingerprint
    recorded = {step for run in (a, b) for step, _ in run.train} | set(a.batch_digests) | set(b.batch_digests)
    for step in sorted(step for step in recorded if step <= last):
        digest = a.batch_digests.get(step)
        if digest is None or digest != b.batch_digests.get(step) or of_other_data:
            return step
    return None
