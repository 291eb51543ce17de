"""Measurements on models: what a projection does to attention."""
