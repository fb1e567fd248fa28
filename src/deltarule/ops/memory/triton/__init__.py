"""Kernels of the linear memories in Triton."""
