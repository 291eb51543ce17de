"""Projections: modules that map the block's normalised input to queries, keys or values. The heart of qurve."""
