"""`long_convolution` in PyTorch: halves by FFT, products for wide keys, and the operator."""
