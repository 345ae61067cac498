"""Tables of quality and size: what settings lose on released checkpoints and on small models, and their bits."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from overview_table import FRONT, RELEASED
from recorded import Result, asked
from table import Row, Table, each, every_row

# Chains of settings, each with one part more than the one before it; the last of a chain is a recipe or a default.
ROTATED = "rotate_k=hadamard,rotate_v=hadamard"
COMPENSATED = "rotate_k=hadamard,compensate_k=true,clip=0.75"
PARTS = {
    "4 bits, `turbo`": (
        ("the paper's", "turbo:sink_num=0"),
        ("a pool of sinks: `turbo`", "turbo"),
        ("values by token", "turbo:prefill_compute=model,v_scale=token"),
        ("keys evened out and rotated", "turbo:rotate_k=hadamard,v_scale=token,equalize_k=true"),
        ("values rotated: `turbo_rotated`", "turbo_rotated"),
    ),
    "4 bits, by channel": (
        ("KIVI's, groups of 128", "kivi:bits=4,group_size=128"),
        ("a pool of sinks", "sinkq:bits=4"),
        ("keys and values rotated", f"sinkq:bits=4,{ROTATED},sink_skip_layers=0"),
        ("keys evened out first: `low4`", "low4"),
    ),
    "2 bits, by channel": (
        ("KIVI's, groups of 128", "kivi:bits=2,group_size=128,residual_length=32"),
        ("a pool of sinks: `sinkq`", "sinkq"),
        ("keys rotated, ranges clipped, errors compensated", f"sinkq:bits=2,{COMPENSATED}"),
        ("keys evened out first", f"sinkq:bits=2,{COMPENSATED},equalize_k=true"),
        ("values rotated: `low2`", "low2"),
    ),
    "8 bits": (
        ("a scale a token: `int8`", "int8"),
        ("keys rotated", "int8:rotate_k=hadamard"),
        ("keys evened out first: `int8_rotated`", "int8_rotated"),
    ),
}
TRAINED = (
    "int8", "sage2", "turboquant", "turbo", "turbo:sink_num=0", "turbo:bits=mixed", "kivi:bits=4", "kivi:bits=2",
    "sinkq",
)  # fmt: skip
# Compression of a cache in the papers: place, figure, its setting, our setting, and why they differ.
# All of head dim 128, as most of the papers' models have.
CLAIMS = """
TurboAttention, abstract | over 4.4x | none named; its main results have 4 bits | turbo:sink_num=0 \
    | 4.4x means 3.64 bits, less than 4-bit codes alone
TurboAttention, abstract | over 4.4x | none named; or mixed, with 2 bits in half of the heads \
    | turbo:bits=mixed,sink_num=0 | holds once the INT8 buffer weighs little
SinkQ, abstract and 4.3 | 6.4x | 2 bits, G 128, long contexts | sinkq \
    | codes, steps and minima give 7.1x; theirs is the slope of peak memory, ours counts open tokens and pool
SinkQ, 4.3 | about 5.0x | 2 bits, G 32, long contexts | sinkq:group_size=32 | the same, with 5.3x
SinkQ, 4.3, names no method | about 5.0x | 2 bits, G 32, long contexts | kivi:bits=2 \
    | the same, with 128 newest tokens open instead of 32 and no pool
Sparse V, 2.1 | 4.6x | turbo3, 14 bytes for 32 values | turboquant:k_format=turbo3,v_format=turbo3 \
    | holds once the 128 newest tokens weigh little
"""
CHECKPOINTS = " ".join(f"{record}*" for record in RELEASED)
LONG = 4096  # tokens from which the papers' claims of size are compared


def checkpoints(results: list[Result]) -> dict[str, dict[str, Row]]:
    """Rows of each released checkpoint by their setting; of one that was recorded twice the later record's counts."""
    known: dict[str, dict[str, Row]] = {model: {} for model in RELEASED.values()}
    for result in results:
        model = next(model for record, model in RELEASED.items() if result["name"].startswith(record))
        known[model] |= {row["setting"]: row | {"checkpoint": model} for row in result["rows"] if "ppl" in row}
    return known


def _tokens(key: str) -> int:
    return int(key.rsplit("_", 1)[1])


def _pass_keys(row: Row) -> str:
    return ", ".join(str(row[key]) for key in sorted((key for key in row if key.startswith("pass_key_")), key=_tokens))


def _released(results: list[Result]) -> Iterable[Row]:
    known = checkpoints(results)
    for name in ("full precision", *FRONT):
        for row in (rows[name] for rows in known.values() if name in rows):
            yield row | {"cache": f"`{name}`" if name in FRONT else name, "keys": _pass_keys(row)}


def _parts(results: list[Result]) -> Iterable[Row]:
    known = checkpoints(results)
    for chain, parts in PARTS.items() if any(known.values()) else ():
        for part, setting in parts:
            found = {model: rows[setting]["kl"] for model, rows in known.items() if setting in rows}
            yield {"chain": chain if part == parts[0][0] else "", "part": part, **found}


def _trained(results: list[Result]) -> Iterable[Row]:
    rows = [row | {"setting": asked(row)} for row in every_row(results) if "kl" in row]
    return sorted((row for row in rows if row["setting"] in TRAINED), key=lambda row: TRAINED.index(row["setting"]))


def _outgrown(row: Row) -> str:
    """The setting of a row, and whether its kernels were compiled meanwhile."""
    name = f"`memory`, {row['memory'] / 2**20:.0f} MiB" if row["memory"] else f"`{row['setting']}`"
    return f"{name}, first of a process" if row["run"] == "cold" else name


def _changes(row: Row) -> str:
    """How often bits changed, and the longest pause of a step around that."""
    bits = [(change["k"], change["v"]) for change in row["changes"]]
    times = sum(one != other for one, other in pairwise(bits))
    return f"{times} times, {row['pauses_ms'][0]:.0f} ms at most" if times else ""


def by_setting(results: list[Result]) -> dict[str, list[Row]]:
    """Rows of bits with a head dim of 128, by setting, fewest tokens first, with the times that 16 bits are more."""
    found: dict[str, list[Row]] = {}
    for row in sorted(every_row(results), key=lambda row: row["tokens"]):
        if row["head_dim"] == 128:
            smaller = {"closed_x": 16 / row["effective_bits"], "all_x": 16 / row["effective_bits_total"]}
            found.setdefault(asked(row), []).append(row | smaller)
    return found


def _bits(results: list[Result]) -> Iterable[Row]:
    known = by_setting(results)
    for name in (name for name in FRONT if name in known):
        for row in known[name]:
            yield row | {"setting": name, "closed": known[name][-1]["effective_bits"]}


def _claimed(results: list[Result]) -> Iterable[Row]:
    """What papers claim, and ours by what the tensors hold in long contexts."""
    known = by_setting(results)
    for claim in CLAIMS.strip().splitlines():
        paper, claimed, of, ours, why = (part.strip() for part in claim.split(" | "))
        for row in (row for row in known.get(ours, []) if row["tokens"] >= LONG):
            shown = {"paper": paper, "claimed": claimed, "of": of, "ours": ours, "why": why}
            yield row | shown | {"closed": known[ours][-1]["closed_x"]}


def _kept(row: Row) -> str:
    return "all tokens" if row["share"] == 1 else f"{row['share']:.0%} by {row['scorer']}"


TABLES = (
    Table("released", CHECKPOINTS,
          "| setting || KL, {checkpoint} | top-1 | perplexity | bits | pass keys |",
          "| {cache} || {kl:.4f}{kl_se: (.4f)} | {same_top1:.3f} | {ppl:.2f} | {bits:.2f} | {keys} |",
          _released, "checkpoint"),
    Table("parts", CHECKPOINTS,
          f"| codes | with | {' | '.join(f'KL, {model}' for model in RELEASED.values())} |",
          f"| {{chain}} | {{part}} | {' | '.join(f'{{{model}:.4f}}' for model in RELEASED.values())} |",
          _parts),
    Table("trained", "quality-*", "| setting || {model} |", "| `{setting}` || {kl:.4f} |", _trained, "model"),
    Table("recipes", "recipes*",
          "| recipe | compared with || KL, {model} | difference |",
          "| `{recipe}` | `{parent}` || {kl:.5f} | {change:+.5f}{se: (.5f)} |",
          across="model"),
    Table("choices", "choose-*",
          "| model | bits at most | chosen | KL | best of the others | its KL | ratio |",
          "| {model} | {bits_at_most:g} | `{setting}` | {kl:.4f} | `{best}` | {best_kl:.4f} | {ratio:.2f} |",
          each(lambda row: "bits_at_most" in row)),
    Table("tuned", "tuned-*",
          "| model | bits at most | seconds | KL | bits | one setting that fits | its KL |",
          "| {model} | {tune_bits:g} | {tune_seconds:.0f} | {kl:.4f}{kl_se: (.4f)} | {bits_total:.2f} | `{best}` "
          "| {best_kl:.4f} |",
          each(lambda row: "tune_bits" in row)),
    Table("outgrown", "budget-*",
          "| cache | tokens | bf16, MiB | most, MiB | bits in the end | seconds | ms a token | repacked |",
          "| {cache} | {tokens} | {bf16_bytes:MiB.0f} | {most_bytes:MiB.1f} | {effective_bits:.2f} | {seconds:.1f} "
          "| {ms_a_token:.2f} | {repacked} |",
          each(cache=_outgrown, repacked=_changes)),
    Table("pruning", "pruning-*",
          "| setting || KL, {kept} | MiB |",
          "| `{method}` || {kl:.4f} | {kv_bytes:MiB.1f} |",
          each(kept=_kept), "kept", split="**{model}**"),
    Table("pruned-keys", "pruned-keys-*",
          "| setting || {kept} |",
          "| `{method}` || {pass_keys} of {asked} |",
          each(kept=_kept), "kept", split="**{model}, {prompt} tokens**"),
    Table("acceptance", "acceptance-*",
          "| cache | in the model | in the draft | in both |",
          "| `{method}` | {in_model:.1%} | {in_draft:.1%} | {in_both:.1%} |",
          each(lambda row: "both" in row["accepted"], in_model=lambda row: row["accepted"]["model"],
               in_draft=lambda row: row["accepted"]["draft"], in_both=lambda row: row["accepted"]["both"])),
    Table("tune", "tune",
          "| model | recipe | on | predicted KL | KL | bits, closed | bits, all |",
          "| {model} | {method} | {on} | {predicted_kl:.6f} | {kl:.6f}{kl_se: (.6f)} | {effective_bits:.3f} "
          "| {effective_bits_total:.3f} |"),
    Table("bits", "bits*",
          "| cache | closed blocks || all, {tokens} tokens |",
          "| `{setting}` | {closed:.3f} || {effective_bits_total:.3f} |",
          _bits, "tokens"),
    Table("claimed", "bits*",
          "| paper | claimed | of | ours | closed blocks || all, {tokens} tokens || why they differ |",
          "| {paper} | {claimed} | {of} | `{ours}` | {closed:.2f}x || {all_x:.2f}x || {why} |",
          _claimed, "tokens"),
)  # fmt: skip
