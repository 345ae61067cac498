"""Reward curves of GRPO on word sums, with rollouts through unpacked and packed caches: JSON rows for `eval/record.py`.

    python eval/record.py grpo-tiny-llama -- python eval/grpo.py FOLDER

Each step samples a group of answers to each sum. An answer's reward is 1 if its number is right, and its advantage is
that reward relative to its group. There is no KL term. A packed cache samples from another distribution than the policy
that is trained, so each token is weighted by the truncated ratio of both probabilities (Yao et al., "Your Efficient RL
Framework Secretly Brings You Off-Policy RL Training", 2025). The setting `bf16` is the unpatched model.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from qattn_hf import patch, unpatch
from qattn_hf.assets.demo_tasks import final_number, sum_prompt, sums
from qattn_hf.model.loading import load, short_name

METHODS = "bf16;int8;turbo"
UNPACKED = "bf16"
TRUNCATED = 2.0  # largest weight of a token
LARGEST_GRADIENT = 1.0
HELD_OUT = 1  # seed of the sums that no step trains on
Sum = tuple[str, str]  # prompt and answer


class Rollout(NamedTuple):
    """Sampled answers.

    Attributes:
        ids, mask: int64 `[B, S]`, prompts and answers with padding on both sides, and 1 for each real token.
        new: bool `[B, T]`, the tokens of answers.
        log_p: fp32 `[B, T]`, log-probabilities of these tokens as they were sampled.
        rewards: fp32 `[B]`.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    new: torch.Tensor
    log_p: torch.Tensor
    rewards: torch.Tensor


def sums_of(rng: random.Random, count: int, options: argparse.Namespace) -> list[Sum]:
    """Fresh sums, each after worked ones."""
    shots = [tuple(sums(rng) for _ in range(options.shots)) for _ in range(count)]
    asked = [sums(rng, options.operations) for _ in range(count)]
    return [(sum_prompt(question, worked), answer) for worked, (question, answer) in zip(shots, asked, strict=True)]


@functools.cache
def pieces_of(tokenizer: Any) -> list[str]:
    """The text of each token."""
    return [tokenizer.decode([i]) for i in range(len(tokenizer))]


def answer_of(tokens: list[int], pieces: list[str], end: str) -> tuple[int, str]:
    """An answer's number of tokens and its text. An empty line or the text `end` is its last part."""
    text = ""
    for count, token in enumerate(tokens, 1):
        text += pieces[token]
        if "\n\n" in text or text.endswith(end):
            return count, text
    return len(tokens), text


def sampled(model: PreTrainedModel, tokenizer: Any, asked: list[Sum], **how: Any) -> Rollout:
    """Answer sums by `generate`, which packs if the model is patched."""
    batch = tokenizer([prompt for prompt, _ in asked], return_tensors="pt", padding=True, padding_side="left")
    batch = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}
    out = model.generate(**batch, **how, use_cache=True, return_dict_in_generate=True, output_logits=True)
    tokens = out.sequences[:, batch["input_ids"].shape[1] :]
    answers = [answer_of(row, pieces_of(tokenizer), tokenizer.eos_token) for row in tokens.tolist()]
    counts = torch.tensor([count for count, _ in answers], device=model.device)
    new = torch.arange(tokens.shape[1], device=model.device) < counts[:, None]
    chosen = zip(out.logits, tokens.T, strict=True)
    log_p = torch.stack([log_probabilities(logits, ids) for logits, ids in chosen], 1)
    right = [final_number(text) == final_number(wanted) for (_, text), (_, wanted) in zip(answers, asked, strict=True)]
    mask = torch.cat([batch["attention_mask"], new.long()], 1)
    return Rollout(out.sequences, mask, new, log_p, torch.tensor(right, device=model.device).float())


def log_probabilities(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities `[...]`, fp32, of the tokens `ids` `[...]` under logits `[..., vocabulary]`."""
    return logits.float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def trained_log_p(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, count: int) -> torch.Tensor:
    """Log-probabilities `[B, count]` of the last tokens by a call that trains: in full precision, with gradients."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(
        ids, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=count + 1
    ).logits[:, :-1]  # fmt: skip
    return log_probabilities(logits, ids[:, -count:])


class Policy:
    """A model's weights with fp32 copies, which the optimizer updates. Rounded steps of bf16 weights would be lost."""

    def __init__(self, model: PreTrainedModel, lr: float):
        self.weights = list(model.parameters())
        self.masters = [weight.detach().float().clone() for weight in self.weights]
        self.optimizer = torch.optim.AdamW(self.masters, lr=lr, betas=(0.9, 0.99), weight_decay=0.0)

    def step(self) -> None:
        """Update the weights from their gradients."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, LARGEST_GRADIENT)
        self.optimizer.step()
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters, strict=True):
                weight.copy_(master)


def update(model: PreTrainedModel, policy: Policy, found: Rollout, options: argparse.Namespace) -> dict[str, float]:
    """Train on one rollout. Returns the distance between sampling and training, over tokens of answers.

    `kl` estimates KL(sampling || training) without bias; `off` is the mean of |ratio - 1|.
    """
    groups = found.rewards.view(-1, options.group)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
    tokens, off, kl = int(found.new.sum()), 0.0, 0.0
    for rows in torch.arange(len(found.ids), device=model.device).split(options.micro):
        new, log_p = found.new[rows], found.log_p[rows]
        full = trained_log_p(model, found.ids[rows], found.mask[rows], new.shape[1])
        difference = (full.detach() - log_p) * new
        ratio = difference.exp()
        weights = ratio.clamp(max=TRUNCATED) * advantages[rows, None] * new
        (-(weights * full).sum() / tokens).backward()
        off += float((ratio - 1).abs().sum()) / tokens
        kl += float((ratio - 1 - difference).sum()) / tokens
    policy.step()
    return {"off": off, "kl": kl}


def accuracy(model: PreTrainedModel, tokenizer: Any, options: argparse.Namespace) -> float:
    """Share of held-out sums that greedy answers of the unpatched model solve."""
    asked = sums_of(random.Random(HELD_OUT), options.held_out, options)
    found = sampled(model, tokenizer, asked, max_new_tokens=options.new_tokens, do_sample=False)
    return float(found.rewards.mean())


def trained(method: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of one setting: means of each `options.every` steps, then of all, with the accuracy at both ends."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    _, model, tokenizer = load(options.model, device, "bfloat16" if device == "cuda" else "float32")
    rng, rows = random.Random(0), []
    torch.manual_seed(0)
    before, started = accuracy(model, tokenizer, options), time.perf_counter()
    policy = Policy(model, options.lr)
    if method != UNPACKED:
        patch(model, method)
    model.train()
    sampling = {"max_new_tokens": options.new_tokens, "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    for step in range(1, options.steps + 1):
        asked = [one for one in sums_of(rng, options.prompts, options) for _ in range(options.group)]
        found = sampled(model, tokenizer, asked, **sampling)
        rows.append({"reward": float(found.rewards.mean()), **update(model, policy, found, options)})
        if step % options.every == 0 or step == options.steps:
            steps = (step - 1) % options.every + 1
            yield {"step": step, "steps": steps, **means(rows[-steps:])}
    seconds = time.perf_counter() - started
    if method != UNPACKED:
        unpatch(model)
    after = accuracy(model.eval(), tokenizer, options)
    all_steps = {name: value for name, value in means(rows).items() if name != "reward"}
    yield {"accuracy_before": before, "accuracy_after": after, **all_steps, "seconds": round(seconds, 1)}


def means(rows: list[dict[str, float]]) -> dict[str, float]:
    """Means of the figures of some steps."""
    return {name: round(sum(row[name] for row in rows) / len(rows), 6) for name in rows[0]}


def main(arguments: list[str] | None = None) -> None:
    made = argparse.ArgumentParser(description="Reward curves of GRPO on word sums, as JSON rows.")
    made.add_argument("model", nargs="?", help="folder or hub name; default: the bundled model")
    made.add_argument("--methods", default=METHODS, help=f"separated by `;`; {UNPACKED} is the unpatched model")
    made.add_argument("--steps", type=int, default=80)
    made.add_argument("--every", type=int, default=10, help="steps of a row")
    made.add_argument("--prompts", type=int, default=32, help="of a step")
    made.add_argument("--group", type=int, default=8, help="answers to a prompt")
    made.add_argument("--micro", type=int, default=64, help="rows of a call that trains")
    made.add_argument("--shots", type=int, default=4, help="worked sums before each")
    made.add_argument("--operations", type=int, default=6, help="of a sum")
    made.add_argument("--new-tokens", type=int, default=112)
    made.add_argument("--held-out", type=int, default=256, help="sums for the accuracy before and after")
    made.add_argument("--lr", type=float, default=3e-5)
    options = made.parse_args(arguments)
    name = "demo" if options.model is None else short_name(options.model)
    for method in options.methods.split(";"):
        for row in trained(method, options):
            print(json.dumps({"bench": "grpo", "model": name, "setting": method, **row}), flush=True)


if __name__ == "__main__":
    main()
