"""Train the demo model of the package: a small Llama that reads, adds and recalls.

    python examples/train_demo_model.py --text books.txt.xz --out qattn_hf/assets/demo_model

Prose comes from `--text`, a file or a hub data set with a `text` column. Sums, recall lists and repeated lists are
generated (demo_data.py). A hinge loss makes `<|bos|>` an attention sink from layer `SINK_LAYER` on, as in large models.
Training ends after `--tokens` or `--minutes`, whichever comes first, and the schedule follows.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from demo_data import BOS, EOS, MIX, PAD, batches, load_text, pieces, train_tokenizer
from demo_eval import evaluate, sinks
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

SINK_LAYER = 2  # the first layer whose heads must have a sink
SINK_MASS = (0.4, 0.7)  # each head's mean attention mass on <|bos|>, at least and at most
SINK_KEY = 0.25  # the key norm of <|bos|> over the mean key norm, at most
SINK_WEIGHT = 0.3
SINK_ROWS, SINK_QUERIES = 8, 64  # the part of a batch that the hinge looks at
DROPOUT = 0.1  # on what attention and MLP add: the prose is read many times
ROW_TOKENS = 4096
ROW_CUTS = (4, 4, 4, 1)  # rows are cut in so many; the pattern repeats

# of every model that is trained here: tokenizer, rows and positions are the same
SHARED = {
    "vocab_size": 4096,
    "max_position_embeddings": ROW_TOKENS,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_config() -> LlamaConfig:
    """About 7 M parameters: 8 layers, 4 query heads, 2 KV heads of 64, tied embeddings."""
    return LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        rms_norm_eps=1e-5,
        **SHARED,
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in Llama's half-split order; x [B, H, T, D]."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).type_as(x)


def sink_hinge(q: Tensor, k: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """How far a layer is from a sink at position 0, and its heads' mean mass there; q [B, Hq, T, D], k [B, Hkv, T, D].

    The upper bound on the mass keeps heads from resting on the sink for good.
    """
    q, k = q[:SINK_ROWS, :, queries].float(), k[:SINK_ROWS].float()
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3) * q.shape[-1] ** -0.5
    future = torch.arange(k.shape[2], device=k.device) > queries[:, None]
    mass = scores.masked_fill(future, -torch.inf).softmax(-1)[..., 0].mean((0, 2))  # [Hq]
    norms = k.norm(dim=-1)
    ratio = (norms[..., 0] / norms.mean(-1)).mean(0)  # [Hkv]
    low, high = SINK_MASS
    outside = F.relu(low - mass) + F.relu(mass - high)
    return outside.mean() + F.relu(ratio - SINK_KEY).mean(), mass.mean()


class Attention(nn.Module):
    biased = False  # queries, keys and values

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.head_dim, inner = config.head_dim, config.num_attention_heads * config.head_dim
        kv_inner = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=self.biased)
        self.k_proj = nn.Linear(config.hidden_size, kv_inner, bias=self.biased)
        self.v_proj = nn.Linear(config.hidden_size, kv_inner, bias=self.biased)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2)), q, k


class MLP(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig, attention: type[Attention]):
        super().__init__()
        self.self_attn, self.mlp = attention(config), MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, q, k = self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + F.dropout(out, DROPOUT, self.training)
        return x + F.dropout(self.mlp(self.post_attention_layernorm(x)), DROPOUT, self.training), q, k


class TrainLlama(nn.Module):
    """Llama with the sink hinge in its loss; parameters are named as in `LlamaForCausalLM`."""

    compiled = True
    attention, final_class = Attention, LlamaForCausalLM
    hinge_weight = SINK_WEIGHT
    measured = staticmethod(sinks)

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config, self.terms = config, {"loss": 1.0, "hinge": self.hinge_weight, "sink_mass": 0.0}
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(Layer(config, self.attention) for _ in range(config.num_hidden_layers))
        self.model.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=0.02 / (2 * config.num_hidden_layers) ** 0.5 if last else 0.02)

    def forward(self, ids: Tensor, queries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Next-token loss, hinge and mean sink mass for ids [B, T]; the hinge looks at the positions `queries`."""
        half = torch.arange(0, self.config.head_dim, 2, device=ids.device) / self.config.head_dim
        theta = self.config.rope_parameters["rope_theta"]
        angles = torch.arange(ids.shape[1] - 1, device=ids.device)[:, None] * theta**-half
        dtype = torch.bfloat16 if ids.is_cuda else torch.float32
        x, cos, sin = self.model.embed_tokens(ids[:, :-1]).to(dtype), angles.cos(), angles.sin()
        hinge, mass = x.new_zeros((), dtype=torch.float32), x.new_zeros((), dtype=torch.float32)
        for i, layer in enumerate(self.model.layers):
            x, q, k = layer(x, cos, sin)
            if i >= SINK_LAYER and self.hinge_weight:
                lack, seen = sink_hinge(q, k, queries)
                hinge, mass = hinge + lack, mass + seen / (len(self.model.layers) - SINK_LAYER)
        logits = F.linear(self.model.norm(x), self.model.embed_tokens.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten()), hinge, mass

    def final(self) -> PreTrainedModel:
        """The model of transformers with these weights."""
        final = self.final_class(self.config)
        missing, unexpected = final.load_state_dict(self.state_dict(), strict=False)
        assert missing == ["lm_head.weight"] and not unexpected, (missing, unexpected)
        final.tie_weights()
        return final


def make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the layers' linear maps, AdamW for the other parameters."""
    matrices = [m.weight for m in model.model.layers.modules() if isinstance(m, nn.Linear)]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=5e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def rate(progress: float) -> float:
    """Share of the peak learning rate: 2 % warm-up, level, the last quarter down to zero."""
    return min(1.0, (progress + 1e-3) / 0.02, max(0.0, 1 - progress) / 0.25)


def train(model: nn.Module, rows, args: argparse.Namespace, device: str) -> dict:
    """Run the schedule over `rows`; returns steps, tokens, seconds and the model's terms, means of the last steps.

    Args:
        model: with `config`, `compiled`, and `terms`, the names and weights of what `forward(ids, queries)` returns.
    """
    optimizers = make_optimizers(model)
    peaks = [o.param_groups[0]["lr"] for o in optimizers]
    step_fn = torch.compile(model, dynamic=False) if device == "cuda" and model.compiled else model
    weights = torch.tensor(list(model.terms.values()), device=device)
    generator = torch.Generator().manual_seed(args.seed)
    start, shown, seen, steps, recent = time.time(), 0.0, 0, 0, []
    while (progress := max(seen / args.tokens, (time.time() - start) / (60 * args.minutes))) < 1:
        cut = ROW_CUTS[steps % len(ROW_CUTS)]
        ids = torch.from_numpy(next(rows).astype(np.int64)).view(-1, ROW_TOKENS // cut)
        ids[:, 0] = model.config.bos_token_id
        queries = torch.randint(ids.shape[1] - 1, (SINK_QUERIES,), generator=generator)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            terms = torch.stack(step_fn(ids.to(device, non_blocking=True), queries.to(device, non_blocking=True)))
        (terms * weights).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate(progress)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seen, steps = seen + ids.numel(), steps + 1
        recent = [*recent[-99:], terms.detach()]
        if steps % 20 == 0 and (now := time.time() - start) - shown > 5:  # reading the losses waits for the device
            means = torch.stack(recent[-20:]).mean(0).tolist()
            shown = now
            print(
                f"{progress:6.1%} {seen / 1e6:7.1f} M tokens {now:5.0f} s {seen / now / 1e6:.2f} M/s"
                + "".join(f"  {name} {mean:.3f}" for name, mean in zip(model.terms, means, strict=True)),
                flush=True,
            )
    means = torch.stack(recent).mean(0).tolist()
    run = {"steps": steps, "tokens": seen, "seconds": round(time.time() - start, 1)}
    return run | {name: round(mean, 4) for name, mean in zip(model.terms, means, strict=True)}


def save(final: PreTrainedModel, tokenizer: Tokenizer, out: Path) -> None:
    """Write the directory that `AutoModelForCausalLM` and `AutoTokenizer` load; weights in bf16."""
    out.mkdir(parents=True, exist_ok=True)
    final.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0, do_sample=False)
    final.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": final.config.max_position_embeddings,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def arguments(doc: str, out: str, tokens: float, minutes: float) -> argparse.Namespace:
    """The command line of a training script, with these defaults."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="prose: a text file (.xz too) or a hub data set's name")
    parser.add_argument("--heldout", help="prose to score, likewise; default: the last 1 %% of --text")
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--results", type=Path, help="where the measurements go as JSON")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=float, default=tokens)
    parser.add_argument("--minutes", type=float, default=minutes)
    parser.add_argument("--rows", type=int, default=32, help=f"rows of {ROW_TOKENS} tokens in a batch")
    parser.add_argument("--prompts", type=int, default=200, help="fresh prompts of each task in the final check")
    return parser.parse_args()


def run(args: argparse.Namespace, kind: type[nn.Module], config, tokenizer: Tokenizer | None = None) -> None:
    """Train a `kind(config)`, write it to `args.out`, and measure what it can do.

    Args:
        tokenizer: a trained one; None trains one on the text.
    """
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    prose = pieces(load_text(args.text))
    cut = len(prose) if args.heldout else len(prose) - max(1, len(prose) // 100)
    heldout = load_text(args.heldout) if args.heldout else "\n\n".join(prose[cut:])
    tokenizer = tokenizer or train_tokenizer(prose[:cut], random.Random(args.seed), config.vocab_size)
    encoded = [np.array(e.ids, dtype=np.uint16) for e in tokenizer.encode_batch(prose[:cut], add_special_tokens=False)]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers encode one text at a time
    print(f"{len(encoded)} pieces of prose, {sum(map(len, encoded)) / 1e6:.1f} M tokens", flush=True)

    rows = batches((tokenizer.to_str(), encoded, args.rows, ROW_TOKENS, args.seed), max(1, (os.cpu_count() or 2) - 1))
    model = kind(config).to(args.device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters on {args.device}", flush=True)
    trained = train(model, rows, args, args.device)
    rows.close()
    save(model.cpu().final(), tokenizer, args.out)
    result = {
        "command": " ".join(sys.argv),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "seed": args.seed,
        "mix": MIX,
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained": trained,
        "scores": evaluate(args.out, heldout, args.prompts, args.seed, args.device, model.measured),
    }
    print(json.dumps(result, indent=2))
    if args.results:
        args.results.parent.mkdir(parents=True, exist_ok=True)
        args.results.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    run(arguments(__doc__, "demo_model", tokens=500e6, minutes=60.0), TrainLlama, make_config())
