"""Tensor parallelism: the KV heads of a layer that a process holds, of a model split over several."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from qattn_kernels.layer.spec import LayerSpec


class Share(NamedTuple):
    """Which part of every layer's heads: the `rank`-th of `size` equal ones, in order."""

    rank: int = 0
    size: int = 1

    def of(self, heads: int) -> range:
        """The heads of this part.

        Raises:
            ValueError: if the parts would not be equal.
        """
        if heads % self.size:
            raise ValueError(f"{heads} KV heads do not divide among {self.size} processes; take fewer (tp_size)")
        count = heads // self.size
        return range(self.rank * count, (self.rank + 1) * count)


ALL = Share()


def share_of(model: Any) -> Share:
    """What transformers' tensor parallelism (`tp_plan`) left in this process; all of it without."""
    size = getattr(model, "_tp_size", None) or 1
    if size == 1:
        return ALL
    mesh = model._device_mesh
    mesh = mesh["tp"] if "tp" in (mesh.mesh_dim_names or ()) else mesh
    return Share(mesh.get_local_rank(), size)


def splits(forward: Any) -> bool:
    """Whether a module's own `forward` is what tensor parallelism put there."""
    return getattr(forward, "__module__", None) == "transformers.distributed.tensor_parallel"


def own_part(spec: LayerSpec, heads: int, share: Share) -> LayerSpec:
    """The layer of a process, from that of all `heads`: a list of heads is its own, counted anew, a number its part.

    Raises:
        ValueError: if the heads, or how many of them get 2 bits, do not divide among the processes.
    """
    own = share.of(heads)
    if share.size == 1:
        return spec
    return dataclasses.replace(spec, k=spec.k.of_process(own, share.size), v=spec.v.of_process(own, share.size))
