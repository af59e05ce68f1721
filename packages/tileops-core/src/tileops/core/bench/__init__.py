"""Measuring what calls cost."""

SCHEMA = "tileops.results/1"  # of the result documents; docs/results.md
