"""Measuring what calls cost."""
