"""SageAttention2 (Zhang et al. 2024): Algorithm 1, smoothed INT8 or INT4 queries and keys, weights and values in FP8.

`psi` of the paper is `quantize`: symmetric codes whose scale `delta` a group of tokens shares. A group is what one
thread of a tensor core holds (section 3.3): of 32 queries those that agree in `n % 8`, of 64 keys those that
agree in `(n % 8) // 2`. The algorithm's `c_w` warps of a block of 128 queries are its segments of 32.

Departures:
- `Q mean(K)^T`, which the paper leaves out as a softmax does not see it, is added back: soft caps, learned sinks and
  the log-sum-exp are of true scores.
- Queries see the keys up to their own; means and scales are of all tokens of a call.
- Queries of 8 bits are not smoothed by default: `smooth_q="none"`.
- Algorithm 1's `l` lacks `l_(j-1)`, and `O` is multiplied by the rescale factor, not divided.
- `O_j` is exact in fp32: the FP22 accumulator of section 3.4 is the hardware's, and the FP32 buffer that keeps it from
  adding up over tiles is the sum in `merge`.
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

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def groups(granularity: str, n: torch.Tensor, block: int, thread: torch.Tensor) -> torch.Tensor:
    """Section 3.3 and Table 2: for each token `n` the number of its group, which shares a scale."""
    return {"token": n, "thread": thread, "block": n // block, "tensor": n * 0}[granularity]


def quantize(X: torch.Tensor, group: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`psi`: `delta = max|X| / levels` of a group, `round(X / delta)`: codes `[..., N, d]`, `delta` `[..., N]`."""
    top = X.abs().amax(-1)
    for g in group.unique():
        top[..., group == g] = top[..., group == g].amax(-1, keepdim=True)
    delta = top / levels
    return torch.round(X / torch.where(delta == 0, 1.0, delta)[..., None]), delta  # one query is its own mean


def mean(X: torch.Tensor) -> torch.Tensor:
    """Over tokens `[..., N, d]`; rounded from fp64, so that it does not depend on the order of the sum."""
    return X.double().mean(-2, keepdim=True).float()


def product(X: torch.Tensor, Y: torch.Tensor) -> torch.Tensor:
    """`X Y^T` of numbers that have no codes; from fp64 for the same reason."""
    return (X.double() @ Y.double().mT).float()


def query_mean(Q: torch.Tensor, smooth_q: str, b_q: int) -> torch.Tensor:
    """`Q_m` of each query: the mean of all of a head, of a block, or zero."""
    size = {"tensor": Q.shape[1], "block": b_q}.get(smooth_q)
    if size is None:
        return torch.zeros_like(Q)
    return torch.cat([mean(part).expand_as(part) for part in Q.split(size, 1)], 1)


def quantize_values(V: torch.Tensor, pv: str) -> torch.Tensor:
    """Section 3.5: FP8 with a scale a channel, `delta_V = max|V| / 448`; dequantized `[N, d]`."""
    if pv == "model":
        return V
    delta_V = V.abs().amax(0) / torch.finfo(FP8[pv]).max
    return (V / torch.where(delta_V == 0, 1.0, delta_V)).to(FP8[pv]).float() * delta_V


def quantize_weights(P: torch.Tensor, pv: str) -> torch.Tensor:
    """Section 3.5: weights of at most 1 in FP8, with the static scale 1 / 448; dequantized."""
    if pv == "model":
        return P
    largest = torch.finfo(FP8[pv]).max
    return (P * largest).to(FP8[pv]).float() / largest


def sage_attention(
    Q: torch.Tensor,
    K: torch.Tensor,
    V: torch.Tensor,
    bits: int = 8,
    granularity: str = "thread",
    smooth_k: bool = True,
    smooth_q: str = "none",
    smooth_v: bool = False,
    pv: str = "e4m3",
    b_q: int = 128,
    b_kv: int = 64,
) -> Result:
    """Causal attention of the last queries `[G, N_q, d]` over `K`, `V` `[N, d]`.

    `pv`: FP8 `e4m3`, the paper's, or `e5m2`; or `model`, weights and values as they are. The paper smooths queries by
    `tensor`.
    """
    Q, K, V, levels = Q.float(), K.float(), V.float(), 2 ** (bits - 1) - 1
    q, k = torch.arange(Q.shape[1]), torch.arange(len(K))
    K_m = mean(K) if smooth_k else torch.zeros_like(K[:1])  # preprocessing
    Q_m = query_mean(Q, smooth_q, b_q)
    V_m = mean(V) if smooth_v else torch.zeros_like(V[:1])  # section 3.6
    Q_hat, delta_Q = quantize(Q - Q_m, groups(granularity, q, b_q, q // 32 * 8 + q % 8), levels)  # quantization
    K_hat, delta_K = quantize(K - K_m, groups(granularity, k, b_kv, k // 64 * 4 + k % 8 // 2), levels)
    V_hat = quantize_values(V - V_m, pv)
    K_tiles, K_hat, delta_K, V_hat = (in_tiles(x, b_kv) for x in (K - K_m, K_hat, delta_K, V_hat))
    blocks: list[Result] = []
    for Q_i, i in query_blocks(Q, len(K), b_q):
        row = i - len(K) + Q.shape[1]
        tiles: list[Tile] = []
        for j in visible_tiles(i, b_kv):
            S = (Q_hat[:, row] @ K_hat[j].mT) * delta_Q[:, row, None] * delta_K[j]
            S = S + product(Q_m[:, row], K_tiles[j])  # what smoothing Q subtracted: the paper's Delta S
            S = mask(S + product(Q_i, K_m), i, j)  # and smoothing K
            m = S.amax(-1)
            if tiles and pv != "model":  # FP8 keeps of a weight what its size below the running maximum leaves
                m = torch.maximum(tiles[-1].m, m)
            P = torch.exp(below(S, m))
            tiles.append(Tile(m, P.sum(-1), quantize_weights(P, pv) @ V_hat[j]))
        blocks.append(merge(tiles))
    O, L = join(blocks)
    return Result(O + V_m, L)
