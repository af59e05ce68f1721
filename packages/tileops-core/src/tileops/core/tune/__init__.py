"""The tuner: which kernel and config serve each bucket of calls best, as measured, and where that is kept."""
