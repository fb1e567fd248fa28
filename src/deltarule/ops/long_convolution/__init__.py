"""Causal convolution with a filter as long as what it remembers."""
