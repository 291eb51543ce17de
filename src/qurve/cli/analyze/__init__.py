"""The commands that look into a trained model: `qurve analyze redundancy`, `symmetry`, `geometry`, `mechanism`."""

from __future__ import annotations

from tyro.extras import SubcommandApp

from qurve.cli.analyze import geometry, mechanism, redundancy, symmetry

analyze = SubcommandApp()
analyze.command(redundancy.redundancy)
analyze.command(symmetry.symmetry)
analyze.command(geometry.geometry)
analyze.command(mechanism.mechanism)
