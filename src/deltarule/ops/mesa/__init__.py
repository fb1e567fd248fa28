"""`mesa`: the read-out that solves for the least squares over all tokens so far."""
