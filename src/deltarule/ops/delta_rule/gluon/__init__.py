"""Warp-specialised stages for sm_90 and sm_100, in Gluon, which comes with Triton."""
