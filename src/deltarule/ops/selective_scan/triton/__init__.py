"""Kernels of `selective_scan` in Triton."""
