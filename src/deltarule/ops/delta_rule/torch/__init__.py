"""Memory-lean chunked forward and explicit backward in PyTorch, for the CPU and any other device.

Chunks are computed a window at a time: as many as stay in a processor's cache. In it they lie on
one axis M; the tensors of a stage are [M, H, G, rows, channels], with G = HV / H value heads for
each key head, or 1 where these share a tensor. Only the scan over chunks (`next_state`) is
sequential. The backward needs the inputs and the state at the start of each chunk, nothing else.
"""
