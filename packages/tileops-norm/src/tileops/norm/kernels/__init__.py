"""The family's kernels, imported when a GPU first plans a call."""
