"""Attention kernels: one file a design, imported when a GPU first plans a call; ``common`` has what they share."""
