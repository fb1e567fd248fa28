"""Maps beside the recurrence, one file each: convolution, norms, gates, SwiGLU, cross entropy."""
