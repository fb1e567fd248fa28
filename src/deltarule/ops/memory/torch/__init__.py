"""Chunked forms of `ttt` and `titans` in PyTorch, for any device."""
