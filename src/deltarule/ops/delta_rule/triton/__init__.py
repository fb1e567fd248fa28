"""GPU kernels in Triton, a file for each stage; imported only where one of them runs."""
