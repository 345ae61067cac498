"""What a trained model can do, measured on fresh seeds in full precision (used by the training scripts)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qattn_hf.assets.demo_tasks import few_shot, final_number, recall


@torch.inference_mode()
def answers(model, tokenizer, prompts: list[str], new_tokens: int, batch: int = 50) -> list[str]:
    """Greedy continuations of `prompts`, in left-padded batches."""
    out = []
    for i in range(0, len(prompts), batch):
        inputs = tokenizer(prompts[i : i + batch], return_tensors="pt", padding=True, padding_side="left")
        ids = model.generate(**inputs.to(model.device), max_new_tokens=new_tokens, do_sample=False)
        out += tokenizer.batch_decode(ids[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    return out


def score_sums(model, tokenizer, count: int, shots: int, seed: str) -> float:
    """Share of fresh word sums whose final number is right."""
    rng = random.Random(seed)
    asked = [few_shot(rng, shots) for _ in range(count)]
    replies = answers(model, tokenizer, [p for p, _ in asked], 90)
    right = [final_number(r) == final_number(a) for r, (_, a) in zip(replies, asked, strict=True)]
    return round(sum(right) / count, 4)


def score_recall(model, tokenizer, count: int, n: int, seed: str) -> float:
    """Share of numbers recalled exactly from a fresh list of `n` pairs."""
    rng = random.Random(seed)
    asked = [recall(rng, n) for _ in range(count)]
    replies = answers(model, tokenizer, [p for p, _ in asked], 6)
    right = [r.split("\n")[0].strip() == a for r, (_, a) in zip(replies, asked, strict=True)]
    return round(sum(right) / count, 4)


def text_rows(tokenizer, text: str, rows: int, tokens: int) -> torch.Tensor:
    """[rows, tokens] of `text`, each row after `<|bos|>`; fewer rows where the text is short."""
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    rows = min(rows, len(ids) // (tokens - 1))
    body = ids[: rows * (tokens - 1)].view(rows, tokens - 1)
    return torch.cat((torch.full((rows, 1), tokenizer.bos_token_id), body), 1)


@torch.inference_mode()
def score_prose(model, ids: torch.Tensor, characters_per_token: float) -> dict:
    """Perplexity a token over rows `ids`, and the same as bits a character."""
    losses = [model(row[None], labels=row[None]).loss.item() for row in ids.to(model.device)]
    loss = sum(losses) / len(losses)
    bits = loss / math.log(2)
    return {"perplexity": round(math.exp(loss), 3), "bits_per_character": round(bits / characters_per_token, 4)}


@torch.inference_mode()
def sinks(path: Path, ids: torch.Tensor, device: str) -> list[dict]:
    """By layer: the heads' mean attention mass on `<|bos|>`, and its key and value norm over the mean norm."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").to(device)
    norms: dict[str, torch.Tensor] = {}

    def keep(name: str):
        def hook(_module, _inputs, out):
            norm = out.unflatten(-1, (-1, model.config.head_dim)).norm(dim=-1)  # [B, T, Hkv]
            norms[name] = (norm[:, 0] / norm.mean(1)).mean()

        return hook

    for i, layer in enumerate(model.model.layers):
        layer.self_attn.k_proj.register_forward_hook(keep(f"{i}k"))
        layer.self_attn.v_proj.register_forward_hook(keep(f"{i}v"))
    maps = model(ids.to(device), output_attentions=True).attentions
    return [
        {
            "mass": [round(m, 3) for m in a[..., 0].mean((0, 2)).tolist()],
            "key_norm": round(norms[f"{i}k"].item(), 3),
            "value_norm": round(norms[f"{i}v"].item(), 3),
        }
        for i, a in enumerate(maps)
    ]


@torch.inference_mode()
def learned_sinks(path: Path, ids: torch.Tensor, device: str) -> list[dict]:
    """By layer: its type, and each head's mean attention mass on its learned sink, which no token gets."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").to(device)
    maps = model(ids.to(device), output_attentions=True).attentions
    return [
        {"type": kind, "mass": [round(m, 3) for m in (1 - weights.sum(-1)).mean((0, 2)).tolist()]}
        for kind, weights in zip(model.config.layer_types, maps, strict=True)
    ]


@torch.inference_mode()
def key_biases(path: Path, ids: torch.Tensor, device: str) -> list[dict]:
    """By layer, before RoPE: each KV head's largest bias of a channel of its keys, and the median of the channels'
    standard deviations over `ids`."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device)
    keys: dict[int, torch.Tensor] = {}
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.k_proj.register_forward_hook(lambda _module, _inputs, out, i=i: keys.update({i: out}))
    model(ids.to(device))
    heads = [out.unflatten(-1, (-1, model.config.head_dim)).flatten(0, 1) for out in keys.values()]  # [B * T, Hkv, D]
    biases = [layer.self_attn.k_proj.bias.view(-1, model.config.head_dim) for layer in model.model.layers]
    return [
        {
            "bias": [round(m, 3) for m in bias.abs().amax(-1).tolist()],
            "varies": [round(m, 3) for m in head.std(0).median(-1).values.tolist()],
        }
        for bias, head in zip(biases, heads, strict=True)
    ]


def evaluate(path: Path, heldout: str, prompts: int, seed: int, device: str, measured: Callable) -> dict:
    """Every score of the saved model, its bf16 weights computed in fp32; `measured` is one of the three above."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().to(device)
    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = text_rows(tokenizer, heldout, 64, 1536)
    characters = len(tokenizer.decode(rows[:, 1:].flatten())) / rows[:, 1:].numel()
    scores: dict = {f"sums_{s}_shot": score_sums(model, tokenizer, prompts, s, f"{seed}/sums{s}") for s in (0, 4)}
    scores |= {f"recall_{n}": score_recall(model, tokenizer, prompts, n, f"{seed}/recall{n}") for n in (10, 40)}
    return scores | score_prose(model, rows, characters) | {measured.__name__: measured(path, rows[:4, :1024], device)}
