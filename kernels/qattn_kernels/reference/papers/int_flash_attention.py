"""INT-FlashAttention (Chen et al. 2024): Algorithm 1, from keys to values in INT8.

Departures:
- `R = 127` everywhere (section 3.2 has 256, Algorithm 1 has 127), and `P / S_P` is `P * R` (section 3.2 has `P / R`).
- `S_V` is of a tile, what the paper's footnote 2 announces; `v_scale="tensor"` is its one scale, fixed by the first
  tile, later values clamped, since a cache cannot know the values to come.
- `S_V` is multiplied into `P` before that is rounded (line 11), not into `O` at the end (line 16): the same codes.
- `P` is rounded under the tile's own maximum: the running one would leave little of a tile whose scores are low.
- `mode="half"`: `Q`, `K` in INT8, `P`, `V` as they are (section 4 says "Q and V" and means Q and K).
- `bits=4` for `Q` and `K`, which the paper names as future work: codes up to 7.
"""

from __future__ import annotations

import torch

from qattn_kernels.reference.papers.online_softmax import (
    Result,
    Tile,
    below,
    in_tiles,
    join,
    mask,
    merge,
    query_blocks,
    visible_tiles,
)

R = 127.0  # largest INT8 code


def quantize(X: torch.Tensor, levels: float = R) -> tuple[torch.Tensor, torch.Tensor]:
    """Section 3.2: `S_X = rowmax|X| / R` and `round(X / S_X)` of each token `[..., d]`."""
    S_X = X.float().abs().amax(-1) / levels
    return torch.round(X.float() / S_X[..., None]), S_X


def quantize_values(V: torch.Tensor, B_c: int, v_scale: str, decode: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes `[T_c, B_c, d]` and scales `[T_c]` of values `[N, d]`."""
    V_tiles = in_tiles(V, B_c)
    S_V = V_tiles.abs().amax((1, 2)) / R
    if v_scale == "tensor" and len(V) >= B_c:
        S_V = S_V[0].repeat(len(V_tiles))
    V8 = torch.round(V_tiles / S_V[:, None, None]).clamp(-R, R)
    if decode:
        V8[-1], S_V[-1] = V_tiles[-1], 1.0
    return V8, S_V


def int_flash_attention(
    Q: torch.Tensor,
    K: torch.Tensor,
    V: torch.Tensor,
    mode: str = "full",
    bits: int = 8,
    v_scale: str = "block",
    decode: bool = False,
    B_r: int = 64,
    B_c: int = 64,
) -> Result:
    """Causal attention of the last queries `[G, N_q, d]` over `K`, `V` `[N, d]`.

    `decode`: of one query whose tile is open in the cache, where values have no codes yet: there `S_V = 1`.
    """
    V = V.float()
    K8, S_K = (in_tiles(x, B_c) for x in quantize(K, 2 ** (bits - 1) - 1))
    V_tiles, S_V = (in_tiles(V, B_c), None) if mode == "half" else quantize_values(V, B_c, v_scale, decode)
    blocks = []
    for Q_i, i in query_blocks(Q, len(K), B_r):  # lines 4 and 5
        Q8, S_Q = quantize(Q_i, 2 ** (bits - 1) - 1)
        tiles = []
        for j in visible_tiles(i, B_c):  # line 7
            S = mask((Q8 @ K8[j].mT) * S_Q[..., None] * S_K[j], i, j)  # line 9
            m = S.amax(-1)  # line 10, of the tile alone
            P = torch.exp(below(S, m))
            if S_V is None:
                tiles.append(Tile(m, P.sum(-1), P @ V_tiles[j]))
                continue
            P_V = P * S_V[j]
            S_P = P_V.amax(-1, keepdim=True) / R
            P8 = torch.round(P_V / torch.where(S_P == 0, 1.0, S_P))  # line 11
            l = (P8 * S_P / S_V[j]).sum(-1)  # line 12: of the rounded weights, so that their unit cancels
            tiles.append(Tile(m, l, (P8 @ V_tiles[j]) * S_P))  # line 13
        blocks.append(merge(tiles))  # line 16
    return join(blocks)
