"""Tensor parallelism: select the KV heads that one process holds of a model split over several processes."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from qattn_kernels.layer.spec import LayerSpec


class Shard(NamedTuple):
    """The KV heads of one process: shard `rank` of `size` equal, contiguous shards of every layer's heads."""

    rank: int = 0
    size: int = 1

    def of(self, heads: int) -> range:
        """Return the indices of this shard's heads out of `heads` in total.

        Raises:
            ValueError: the heads do not divide evenly.
        """
        if heads % self.size:
            raise ValueError(f"{heads} KV heads do not divide among {self.size} processes; take fewer (tp_size)")
        count = heads // self.size
        return range(self.rank * count, (self.rank + 1) * count)


ALL = Shard()


def shard_of(model: Any) -> Shard:
    """Return this process's shard of a model split by Transformers' `tp_plan`, or all heads of an unsplit model."""
    size = getattr(model, "_tp_size", None) or 1
    if size == 1:
        return ALL
    mesh = model._device_mesh
    mesh = mesh["tp"] if "tp" in (mesh.mesh_dim_names or ()) else mesh
    return Shard(mesh.get_local_rank(), size)


def splits(forward: Any) -> bool:
    """Return whether Transformers' tensor parallelism set a module's instance attribute `forward`."""
    return getattr(forward, "__module__", None) == "transformers.distributed.tensor_parallel"


def shard_spec(spec: LayerSpec, heads: int, shard: Shard) -> LayerSpec:
    """Return the spec of one process's shard of a layer, from the spec of all `heads` KV heads.

    Lists of 2-bit heads keep this shard's heads, renumbered from 0. A number of 2-bit heads is divided by the shards.

    Raises:
        ValueError: the heads, or the number of 2-bit heads, do not divide evenly among the processes.
    """
    own = shard.of(heads)
    if shard.size == 1:
        return spec
    return dataclasses.replace(spec, k=spec.k.of_process(own, shard.size), v=spec.v.of_process(own, shard.size))
