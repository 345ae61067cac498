"""The packed layer of latent attention (MLA): steps read stored latents, prompts read expanded keys and values."""

from __future__ import annotations

from typing import Any

import torch

from qattn_hf.layer.handle import Handle
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.model.device import capturing, compiling
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.step import Step
from qattn_kernels.step.latent_prompt import UpProjections, attend_expanded, by_expansion


class LatentLayer(QAttnLayer):
    """Latents (stored as V) and RoPE parts (stored as K) of one attention layer (`qattn_hf.model.latent`)."""

    def stored(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return value_states, key_states

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Record the latents `[B, 1, T, kv_lora_rank]` and RoPE parts `[B, 1, T, qk_rope_head_dim]` of a call.

        The arguments come in the order in which modules pass them. Returns the same `Handle` twice.
        """
        return super().update(*self.stored(key_states, value_states), *args, **kwargs)

    def attend_latents(
        self,
        query: torch.Tensor,
        handle: Handle,
        span: torch.Tensor,
        scores: Scores,
        unpadded: bool,
        up: UpProjections,
    ) -> torch.Tensor:
        """Write the handle's tokens and attend.

        Args:
            query: `[B, Hq, T, qk_nope_head_dim + qk_rope_head_dim]`, as the module computes it.
            handle, span, scores, unpadded: as in `QAttnLayer.attend`.
            up: the module's up-projections.

        Returns:
            `[B, Hq, T, v_head_dim]`, zeros for padding on the left.
        """
        tokens, fixed = query.shape[2], compiling() or capturing()
        masked = 0 if unpadded and self._used == 0 else self.capacity + tokens
        if fixed or not by_expansion(query, masked, self.spec, scores):
            return up.expand(self.attend(up.absorb(query), handle, span, scores, unpadded)[0])
        self._check_call(query, handle)
        past = self._blocks_for(self.reserve(tokens))
        with self.writing(tokens):
            step = Step(query, handle.key, handle.value, span, self, scores, past)
            out = attend_expanded(step, unpadded, up)
        self.count(tokens)
        self.prompt_by = "sdpa"
        return out
