"""Attention as each paper writes it, one file per paper, to read along with the paper.

The code loops over blocks of queries and tiles of keys in the paper's symbols, for one KV head of one row and the `G`
query heads that share it. `reference/attention.py` computes the same for all heads and tiles at once, and tests compare
kernels with it. `tests/kernels/test_papers_attention.py` checks that both agree bit for bit. "Departures" in a
docstring lists where and why the project differs from the paper; the code follows the project.

Only `reference/attention.py` handles padding and masked tokens, sliding windows, soft caps, learned sinks, sparse V,
and zeros without a scale.

| paper | meaning | in `reference/attention.py` |
| --- | --- | --- |
| `N`, `N_q` | tokens; queries, which are the last `N_q` of them | `S`, `T` |
| `d` | head dim | `D` |
| `B_r`, `b_q`; `B_c`, `b_kv` | queries of a block; keys of a tile | `compute.block_q`; `window.block` |
| `Q_i`; `K_j`, `V_j` | block `i` of queries; tile `j` of keys and values | `Queries`; `Tiles` |
| `S` | scores, softmax scale included | `s` |
| `m` | maximum of a row of scores: of a tile, or the running one | `top` |
| `P` | weights `exp(S - m)` | `p` |
| `l` | row sum of the weights | `sums`, merged `total` |
| `O`, `L` | output, and log-sum-exp `m + log(l)` | `out`, `lse` |

Queries come with the softmax scale in them: `Q = q / sqrt(d)`.
"""
