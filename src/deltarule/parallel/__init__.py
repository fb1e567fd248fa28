"""One model on several processes: shards of weights, heads and sequences, on torch.distributed."""

from deltarule.parallel.spread import parallelize
from deltarule.parallel.world import MeshOptions, World, make_mesh

__all__ = ["MeshOptions", "World", "make_mesh", "parallelize"]
