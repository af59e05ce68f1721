"""The GEMM family's kernels, one file a design. A GPU's first plan imports those that the op names."""
