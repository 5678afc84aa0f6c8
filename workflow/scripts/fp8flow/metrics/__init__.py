"""Metric modules that `evaluate` loads from here, so that scoring works offline."""
