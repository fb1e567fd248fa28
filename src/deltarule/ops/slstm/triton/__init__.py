"""Kernels of `slstm` in Triton."""
