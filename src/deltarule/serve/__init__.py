"""What servers call: operators on a pool of many requests' states, and plugins of two engines."""

from deltarule.ops.serving.convolution import pool_convolution
from deltarule.ops.serving.prefill import PrefillOutput, pool_prefill
from deltarule.ops.serving.step import pool_step

__all__ = ["PrefillOutput", "pool_convolution", "pool_prefill", "pool_step"]
