"""Comparators: kinds from other papers, each registered beside the model's own. No torch at import."""

from __future__ import annotations

from qurve.zoo import hyper_connections as hyper_connections
