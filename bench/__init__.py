"""Benchmarks: time, memory saved for the backward pass and error, side by side."""
