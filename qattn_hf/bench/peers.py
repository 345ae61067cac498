"""Decode kernels of other libraries, for `qattn bench decode --peers`.

To add a peer, write a class with the members of `Peer`, and a line in `PEERS`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import torch

from qattn_hf.bench.layers import Heads

FP8 = torch.float8_e4m3fn
PAGE = 64  # tokens in a page of XQA
LEAST_SPLIT = 128  # tokens, about what FlashAttention 3 reads at once
XQA_WORKSPACE = 128 * 2**20  # bytes: 8 MiB of semaphores, then partial results of splits

Step = Callable[[], torch.Tensor]


class Token(NamedTuple):
    """A query `[B, Hq, 1, D]`, and the key and value `[B, Hkv, 1, D]` that its step writes."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class Peer(Protocol):
    """A library's cache of one layer: `context` tokens in each of `batch` rows. Each step overwrites the last token.

    Attributes:
        choices: what `step` takes as `choice`, such as numbers of splits. The fastest one counts.
        writer: what writes the new token: `vllm`'s kernel, or PyTorch's `copies`.
    """

    choices: tuple[Any, ...]
    writer: str

    def contents(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stored keys and values `[B, Hkv, S, D]`. All scales are 1."""
        ...

    def step(self, choice: Any, token: Token) -> Step:
        """Return a function that writes the new token and attends. It returns the output `[B, Hq, 1, D]`."""
        ...


class FlashAttention3:
    """FlashAttention 3 from vLLM's wheel, over contiguous rows `[B, S, Hkv, D]` in `dtype`."""

    def __init__(self, dtype: torch.dtype, heads: Heads, batch: int, context: int, device: torch.device):
        self.k, self.v = (_random((batch, context, heads.kv, heads.dim), dtype, device) for _ in range(2))
        self.write, self.writer = token_writer(self.k, self.v, context)
        # The numbers of splits of a row. With 0 the library chooses.
        self.choices = tuple(n for n in (0, 1, 2, 4, 8, 16, 32) if n * LEAST_SPLIT <= max(context, LEAST_SPLIT))
        importlib.import_module("vllm.vllm_flash_attn")  # registers the operator
        self.attend = torch.ops._vllm_fa3_C.fwd.default
        # vLLM's build takes rows of any lengths only.
        given = {
            "k": self.k, "v": self.v, "softmax_scale": heads.dim**-0.5,
            "cu_seqlens_q": torch.arange(batch + 1, dtype=torch.int32, device=device),
            "seqused_k": torch.full((batch,), context, dtype=torch.int32, device=device),
            "max_seqlen_q": 1, "max_seqlen_k": context, "is_causal": False, "window_size_left": -1,
            "window_size_right": -1, "softcap": 0.0, "is_rotary_interleaved": False, "sm_margin": 0,
            "cp_world_size": 1, "cp_rank": 0,
        }  # fmt: skip
        # The operator has no defaults, and its versions differ in optional arguments.
        self.arguments = {argument.name: given.get(argument.name) for argument in self.attend._schema.arguments}

    def contents(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k.transpose(1, 2), self.v.transpose(1, 2)

    def step(self, choice: int, token: Token) -> Step:
        q = token.q.squeeze(2)
        query = q.to(self.k.dtype)
        arguments = {**self.arguments, "q": query, "num_splits": choice}

        def run() -> torch.Tensor:
            self.write(token)
            if query is not q:  # the query of FP8 attention is FP8
                query.copy_(q)
            out: torch.Tensor = self.attend(**arguments)[0]
            return out.unsqueeze(2)

        return run


class XQA:
    """FlashInfer's XQA over FP8 pages `[P, Hkv, 64, D]`, which are in order."""

    choices = (None,)

    def __init__(self, heads: Heads, batch: int, context: int, device: torch.device):
        decode = importlib.import_module("flashinfer.decode")
        pages = -(-context // PAGE)
        self.k, self.v = (_random((batch * pages, heads.kv, PAGE, heads.dim), FP8, device) for _ in range(2))
        self.write, self.writer = token_writer(self.k.transpose(1, 2), self.v.transpose(1, 2), context)
        self.batch, self.context = batch, context
        self.attend = partial(
            decode.trtllm_batch_decode_with_kv_cache,
            kv_cache=(self.k, self.v),
            workspace_buffer=_xqa_workspace(device),
            block_tables=torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages),
            seq_lens=torch.full((batch,), context, dtype=torch.int32, device=device),
            max_seq_len=context,
            bmm1_scale=heads.dim**-0.5,
            bmm2_scale=1.0,
            kv_layout="HND",
            backend="xqa",
        )

    def contents(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows = (x.unflatten(0, (self.batch, -1)).transpose(1, 2).flatten(2, 3) for x in (self.k, self.v))
        keys, values = (x[:, :, : self.context] for x in rows)
        return keys, values

    def step(self, choice: None, token: Token) -> Step:
        query = token.q.squeeze(2)

        def run() -> torch.Tensor:
            self.write(token)
            out: torch.Tensor = self.attend(query)
            return out.unsqueeze(2)

        return run


class Library(NamedTuple):
    """Where a peer is from.

    Attributes:
        make: makes a cache from heads, batch, context and device. It imports the library.
        module: name of the library's top module.
        package: what pip installs.
    """

    make: Callable[[Heads, int, int, torch.device], Peer]
    module: str
    package: str


PEERS = {
    "fa3 bf16": Library(partial(FlashAttention3, torch.bfloat16), "vllm", "vllm"),
    "fa3 fp8": Library(partial(FlashAttention3, FP8), "vllm", "vllm"),
    "xqa fp8": Library(XQA, "flashinfer", "flashinfer-python"),
}


def installed() -> dict[str, Library]:
    """Return the peers whose library is installed, by name."""
    return {name: peer for name, peer in PEERS.items() if find_spec(peer.module)}


def missing() -> list[str]:
    """Return one line for each peer that is not installed. It says how to get it."""
    here = installed()
    return [
        f"{name}: not installed. Fix: pip install {peer.package}" for name, peer in PEERS.items() if name not in here
    ]


def telling_token(heads: Heads, batch: int, context: int, device: torch.device) -> Token:
    """Make a random token whose key takes about half of the attention of the first query head of each KV head.

    An output is thus wrong if the step does not write the token or does not read it.
    """
    q, v = (_random((batch, count, 1, heads.dim), heads.dtype, device) for count in (heads.query, heads.kv))
    # With k = c * sign(q) the score is c * sum(|q|) / sqrt(D), and |q| is sqrt(2 / pi) on average. The exponentials of
    # the other scores sum up to about `context`.
    c = math.log(context) / math.sqrt(heads.dim * 2 / math.pi)
    return Token(q, q[:, :: heads.query // heads.kv].sign() * c, v)


def check(out: torch.Tensor, token: Token, peer: Peer) -> float:
    """Compare a step's output with attention in fp64 over the same stored numbers.

    Args:
        out: `[B, Hq, 1, D]`.

    Returns:
        The largest difference of a head's output, relative to its norm.

    Raises:
        RuntimeError: the difference is above the eps of the stored dtype. Kernels round the query, the weights and the
            output to that dtype or a finer one, each by at most eps / 2. Together these roundings average below eps.
    """
    keys, values = peer.contents()
    differences = [
        _difference(
            out[row, :, 0], token.q[row, :, 0], _ends(keys[row], token.k[row]), _ends(values[row], token.v[row])
        )
        for row in range(out.shape[0])  # one at a time, since fp64 is four or eight times as large
    ]
    most, allowed = float(torch.stack(differences).max()), torch.finfo(keys.dtype).eps
    if not most <= allowed:  # `not` finds NaN as well
        raise RuntimeError(f"wrong output: a head is {most:.2%} off attention in fp64, and {allowed:.2%} is allowed")
    return most


def _ends(stored: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return fp64 numbers `[Hkv, S, D]` that end with the new token as the cache must store it."""
    return torch.cat([stored[:, :-1].double(), new.to(stored.dtype).double()], dim=1)


def _difference(out: torch.Tensor, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the largest relative difference of `out` `[Hq, D]`, for q `[Hq, D]`, keys and values `[Hkv, S, D]`."""
    queries = q.double().unflatten(0, (keys.shape[0], -1))
    weights = (queries @ keys.mT * q.shape[-1] ** -0.5).softmax(-1)
    want = (weights @ values).flatten(0, 1)
    return ((out.double() - want).norm(dim=-1) / want.norm(dim=-1)).max()


def token_writer(keys: torch.Tensor, values: torch.Tensor, context: int) -> tuple[Callable[[Token], None], str]:
    """Return a function that writes a token as the last one of each row, and what writes: `vllm` or `copies`.

    Args:
        keys, values: pages `[P, page, Hkv, D]`, equally many for each row.
        context: tokens of a row.
    """
    page = keys.shape[1]
    pages = -(-context // page)  # of a row
    if not (keys.is_cuda and find_spec("vllm")):
        last = [x[pages - 1 :: pages, (context - 1) % page] for x in (keys, values)]

        def copy(token: Token) -> None:
            for place, new in zip(last, (token.k, token.v), strict=True):
                place.copy_(new.squeeze(2))

        return copy, "copies"
    operators = importlib.import_module("vllm._custom_ops")
    slots = torch.arange(context - 1, keys.shape[0] * page, pages * page, device=keys.device)
    one = torch.ones(1, device=keys.device)
    kind = "fp8" if keys.dtype == FP8 else "auto"
    caches = [x.view(torch.uint8) if kind == "fp8" else x for x in (keys, values)]

    def write(token: Token) -> None:
        operators.reshape_and_cache_flash(token.k.squeeze(2), token.v.squeeze(2), *caches, slots, kind, one, one)

    return write, "vllm"


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Normally distributed numbers. They need no scale in FP8, whose largest number is 448."""
    return torch.randn(shape, dtype=torch.bfloat16, device=device).to(dtype)


@cache
def _xqa_workspace(device: torch.device) -> torch.Tensor:
    """Return XQA's workspace, which calls take in turn. It must be zero for the first one."""
    return torch.zeros(XQA_WORKSPACE, dtype=torch.uint8, device=device)
