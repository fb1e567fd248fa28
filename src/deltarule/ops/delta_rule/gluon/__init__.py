"""Warp-specialised stages for Hopper, in Gluon, which comes with Triton."""
