"""One layer of the packed cache: its device tensors, and everything that moves rows or blocks, written once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from qattn_hf.errors import CapacityError, UnsupportedError
from qattn_hf.handle import Handle
from qattn_kernels.crop import crop
from qattn_kernels.layout import Geometry, State, TensorSpec
from qattn_kernels.online import Scores
from qattn_kernels.operator import attend, state_names
from qattn_kernels.ring import resize_ring
from qattn_kernels.spec import LayerSpec
from qattn_kernels.state import layer_tensors
from qattn_kernels.support import unsupported


def bucket(blocks: int) -> int:
    """Capacity for `blocks` blocks: quarter steps between powers of two, the same however a cache got there."""
    step = max(1, 1 << max(0, (blocks - 1).bit_length() - 3))
    return -(-blocks // step) * step


class QAttnLayer(CacheLayerMixin):
    """Packed keys and values of one attention layer.

    `update` only records: it returns one `Handle` for key and value, and the attention function writes, packs and
    attends through `attend`. All state lives in device tensors at fixed addresses, `state_tensors()`.

    Args:
        spec: formats, window, compute, sparsity and implementation of this layer.
        max_cache_len: tokens a row can ever hold; a call beyond it raises `CapacityError`. None: the layer grows.
        device_type: the device type that `spec.impl` was resolved for; another one is refused.
    """

    is_croppable, is_sliding = True, False

    def __init__(self, spec: LayerSpec, max_cache_len: int | None = None, device_type: str | None = None):
        super().__init__()
        self.spec, self.max_cache_len, self.device_type = spec, max_cache_len, device_type
        self.planned = max_cache_len is not None  # the capacity is known to suffice, so it stays as it is
        self.blocks = bucket(self._blocks_for(max_cache_len or 1))
        self.state: State = {"seen": torch.zeros((), dtype=torch.int64)}
        self._text = spec.encode()
        self.moves = 0  # how often tensors took another place, which ends what was captured over them
        self._used = 0  # upper bound of the slots any row uses, kept on the host so that no step waits for the device

    # The contract of transformers' caches

    @property
    def is_compileable(self) -> bool:
        """Whether the capacity stays as it is, so that a decode step can be compiled or captured."""
        return self.planned

    @property
    def capacity(self) -> int:
        """Token slots of a row at present."""
        return self.blocks * self.spec.window.block

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for the batch, heads and dims of `[B, Hkv, T, D]` keys and values."""
        device = key_states.device
        if self.device_type is not None and device.type != self.device_type:
            raise UnsupportedError(
                f"the model was patched for {self.device_type} and runs on {device.type}; patch it again"
            )
        heads = key_states.shape[1]
        low = max(getattr(store.core, "n_low", 0) for store in (self.spec.k, self.spec.v))
        if low > heads:
            raise UnsupportedError(
                f"the recipe gives {low} heads of a layer 2 bits, but only {heads} KV heads are here: "
                "use bits=4 or bits=2"
            )
        k_dim, v_dim = key_states.shape[-1], value_states.shape[-1]
        reason = unsupported(self.spec, heads, heads, k_dim, v_dim) if self.spec.impl == "triton" else None
        if reason is not None:
            raise UnsupportedError(f"this layer was meant for Triton kernels, but {reason}: use impl='reference'")
        self.geometry = self.geometry_of(key_states, value_states)
        self.dtype, self.device = key_states.dtype, device
        with torch.inference_mode(False):  # else what began under inference_mode could not be written outside it
            self.state = {name: spec.empty_state(device) for name, spec in self.tensor_specs().items()}
        self._fix_addresses()
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Record the call; the same handle stands for the key and the value."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        handle = Handle(self, key_states, value_states)
        return handle, handle

    def get_seq_length(self) -> torch.Tensor:
        """Columns seen, padding included, as a live 0-d int64 tensor."""
        return self.state["seen"]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.capacity, 0

    def get_max_length(self) -> int:
        return self.capacity if self.planned else -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        """Forget everything; the tensors stay."""
        for tensor in self.state.values():
            tensor.zero_()
        self._used = 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes the old row `beam_idx[i]`, in place."""
        if self.is_initialized:
            for tensor, dim in self.state_tensors().values():
                if dim is not None:
                    tensor.copy_(tensor.index_select(dim, beam_idx.to(tensor.device)))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices` `[n]`, in that order."""
        if self.is_initialized:
            self._replace_rows(lambda t, dim: t.index_select(dim, indices.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, one after another."""
        if self.is_initialized:
            self._replace_rows(lambda t, dim: t.repeat_interleave(repeats, dim))

    def crop(self, tokens_to_remove: int | torch.Tensor) -> None:
        """Remove tokens from the end of every row: -n the last n, 0 none; n > 0 all but the first n columns.

        Raises:
            UnsupportedError: if a removed column belongs to a call that had padding; nothing was changed.
        """
        count = int(tokens_to_remove)
        if not self.is_initialized or count == 0:  # a deferred stop check says 0 at every step: no wait for the device
            return
        seen = int(self.state["seen"])
        drop = min(-count, seen) if count < 0 else max(0, seen - count)
        if drop == 0:
            return
        if drop == seen:
            return self.reset()
        if seen - drop < int(self.state["padded"]):
            raise UnsupportedError(
                f"cannot crop {drop} columns: some belong to a call with padding, whose columns do not map to tokens "
                "of a row. Crop less, or start from a fresh cache"
            )
        crop(self.state, self.spec, drop)
        self._used = self._slots_used()

    def activate_past_recording(self) -> None:
        """Announces roll-backs: the ring holds `crop_horizon` tokens more than are open (see `raise_horizon`)."""

    def offload(self) -> None:
        raise UnsupportedError("a packed cache does not offload yet; make it without offloading")

    prefetch = offload

    # What a packed layer adds

    def attend(
        self, query: torch.Tensor, handle: Handle, span: torch.Tensor, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the handle's tokens and attend.

        Args:
            query: `[B, Hq, T, D]`. handle: from `update` of this layer.
            span: int32 `[B or 1, 2]`, first real new column and number of real ones.
            scores: scale, softcap, window and learned sinks.

        Returns:
            output `[B, Hq, T, Dv]`, zeros for padding, and fp32 log-sum-exp `[B, Hq, T]`.
        """
        if query.shape[0] != self.state["length"].shape[0]:
            raise UnsupportedError(
                f"the cache holds {self.state['length'].shape[0]} rows and the call has {query.shape[0]}; "
                "use a fresh cache, or batch_repeat_interleave / batch_select_indices"
            )
        past = self.blocks
        if not torch.compiler.is_compiling():
            self.reserve(query.shape[2])
            past = self._blocks_for(self._used)
            self.count(query.shape[2])
        tensors = list(self.state.values())
        return attend(
            query,
            handle.key,
            handle.value,
            span,
            tensors,
            self._text,
            scores.scale,
            scores.softcap,
            scores.window,
            scores.sinks,
            past,
        )

    def state_tensors(self) -> dict[str, tuple[torch.Tensor, int | None]]:
        """Every tensor of the layer by name, with its batch dimension (None: shared by all rows)."""
        if not self.is_initialized:
            return {}
        return {name: (self.state[name], spec.batch_dim) for name, spec in self.tensor_specs().items()}

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more columns, outside any captured step.

        Raises:
            CapacityError: if the layer may not grow; nothing was written.
        """
        if self._used + tokens > self.capacity:
            self._used = self._slots_used()
        if self._used + tokens > self.capacity:
            if self.max_cache_len is not None:
                raise CapacityError(
                    f"the cache holds {self.capacity} tokens a row, {self._used} are taken and {tokens} more came; "
                    "nothing was written. Use a larger max_cache_len, or none so that the cache grows"
                )
            self._grow(bucket(self._blocks_for(self._used + tokens)))
            self.planned = False

    def plan(self, tokens: int) -> None:
        """Grow to `tokens` columns in all, which the caller knows to be the most: the capacity then stays fixed.

        Raises:
            CapacityError: if the layer may not grow and they would not fit; nothing was changed.
        """
        self._used = self._slots_used()
        slack = max(0, self._used - int(self.state["seen"]))  # slots lost to short blocks
        if self.max_cache_len is None:
            self._grow(max(self.blocks, bucket(self._blocks_for(tokens + slack))))
            self.planned = True
        elif tokens + slack > self.capacity:
            raise CapacityError(
                f"the cache holds {self.capacity} tokens a row and generate may need {tokens + slack}; nothing was "
                "changed. Use a larger max_cache_len, fewer max_new_tokens, or a cache that grows"
            )

    def raise_horizon(self, tokens: int) -> None:
        """Let `crop` take back `tokens` tokens bit for bit from here on."""
        if tokens <= self.spec.window.horizon:
            return
        old = self.spec
        self.spec = replace(old, window=replace(old.window, horizon=tokens))
        self._text = self.spec.encode()
        if self.is_initialized:
            resize_ring(self.state, old, self.spec)
            self._fix_addresses()

    def count(self, tokens: int) -> None:
        """Note on the host that `tokens` more columns are written; `reserve` made room for them."""
        self._used += tokens

    def geometry_of(self, key_states: torch.Tensor, value_states: torch.Tensor) -> Geometry:
        """Sizes of a layer of this capacity that holds such keys and values."""
        batch, heads, _, k_dim = key_states.shape
        return Geometry(batch, heads, k_dim, value_states.shape[-1], self.blocks, key_states.dtype)

    # Inside

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.spec.window.block)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Shape and role of every tensor of the layer, by name."""
        return layer_tensors(self.geometry, self.spec)

    def _slots_used(self) -> int:
        """Slots that the fullest row uses, short blocks' dead ones included; asks the device."""
        if not self.is_initialized:
            return 0
        s = self.state
        return int((s["closed"] * self.spec.window.block + s["length"] - s["open_start"]).max())

    def _grow(self, blocks: int) -> None:
        """Larger arenas with the old content; if memory runs out the layer is as it was."""
        if blocks == self.blocks or not self.is_initialized:
            self.blocks = blocks
            return
        geometry = replace(self.geometry, blocks=blocks)
        grown = {}
        with torch.inference_mode(False):
            for name, spec in layer_tensors(geometry, self.spec).items():
                if spec.block_dim is not None:
                    grown[name] = spec.empty_state(self.device)
                    grown[name].narrow(spec.block_dim, 0, self.blocks).copy_(self.state[name])
        self.blocks, self.geometry = blocks, geometry
        self.state.update(grown)
        self._fix_addresses()

    def _replace_rows(self, move: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        with torch.inference_mode(False):
            for name, (tensor, dim) in self.state_tensors().items():
                if dim is not None:
                    self.state[name] = move(tensor, dim).clone()
        self.geometry = replace(self.geometry, batch=self.state["length"].shape[0])
        self._fix_addresses()

    def _fix_addresses(self) -> None:
        """Tell compiled steps that the state stays where it is, and captured ones that it was elsewhere."""
        assert tuple(self.state) == state_names(self.spec)
        self.moves += 1
        if not torch.compiler.is_compiling():
            for tensor in self.state.values():
                torch._dynamo.mark_static_address(tensor)
