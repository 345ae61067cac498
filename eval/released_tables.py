"""Tables of quality on released checkpoints: what recommended settings lose, and where the loss comes from."""

from __future__ import annotations

from pathlib import Path

from overview_table import FRONT, RELEASED
from recorded import Result, asked, load, markdown

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
}  # fmt: skip
TRAINED = (
    "int8", "sage2", "turboquant", "turbo", "turbo:sink_num=0", "turbo:bits=mixed", "kivi:bits=4", "kivi:bits=2",
    "sinkq",
)  # fmt: skip
NOT_MEASURED = "Not measured yet."


def rows_of(results: Path, record: str) -> dict[str, Result]:
    """Rows of one checkpoint by their setting, of all its records; a later record by name counts first."""
    found = [row for result in load(results, record) for row in result["rows"]]
    return {row["setting"]: row for row in found if "ppl" in row}


def released_table(results: Path) -> str:
    """What each recommended setting loses on each checkpoint: KL, top-1, total variation, perplexity, pass keys."""
    parts = []
    for record, name in RELEASED.items():
        rows = rows_of(results, record)
        keys = sorted({key for row in rows.values() for key in row if key.startswith("pass_key_")}, key=_tokens)
        lines = [
            [
                f"`{setting}`" if setting in FRONT else setting,
                *(f"{row[key]:{form}}" if key in row else "" for key, form in SHOWN.items()),
                *(str(row.get(key, "")) for key in keys),
            ]
            for setting in ("full precision", *FRONT)
            if (row := rows.get(setting)) is not None
        ]
        header = ["setting", *HEADINGS, *(f"keys at {_tokens(key):,}" for key in keys)]
        if lines:
            parts.append(f"**{name}**\n\n{markdown(header, lines)}")
    return "\n\n".join(parts) or NOT_MEASURED


SHOWN = {"kl": ".4f", "kl_se": ".4f", "same_top1": ".3f", "total_variation": ".3f", "ppl": ".2f", "bits": ".2f"}
HEADINGS = ("KL", "its error", "top-1", "total variation", "perplexity", "bits")


def _tokens(key: str) -> int:
    return int(key.rsplit("_", 1)[1])


def parts_table(results: Path) -> str:
    """KL on each checkpoint as parts are added, one a line."""
    known = [rows_of(results, record) for record in RELEASED]
    lines = [
        [chain if i == 0 else "", part, *(f"{rows[setting]['kl']:.4f}" if setting in rows else "" for rows in known)]
        for chain, parts in PARTS.items()
        for i, (part, setting) in enumerate(parts)
    ]
    return (
        markdown(["codes", "with", *(f"KL, {name}" for name in RELEASED.values())], lines)
        if any(known)
        else NOT_MEASURED
    )


def trained_table(results: Path) -> str:
    """KL on the small trained models, a column each."""
    models: dict[str, dict[str, float]] = {}
    for row in (row for result in load(results, "quality-full-") for row in result["rows"] if "kl" in row):
        models.setdefault(row["model"], {})[asked(row)] = row["kl"]
    lines = [[f"`{name}`", *(f"{kl[name]:.4f}" if name in kl else "" for kl in models.values())] for name in TRAINED]
    return markdown(["setting", *models], lines) if models else NOT_MEASURED


def choices_table(results: Path) -> str:
    """What models chose within so many bits, next to the best of the settings that were measured in the same run."""
    rows = [row for result in load(results, "choose-") for row in result["rows"] if "bits_at_most" in row]
    lines = [
        [
            row["model"],
            f"{row['bits_at_most']:g}",
            f"`{row['setting']}`",
            f"{row['kl']:.4f}",
            f"`{row['best']}`",
            f"{row['best_kl']:.4f}",
            f"{row['ratio']:.2f}",
        ]
        for row in rows
    ]
    header = ["model", "bits at most", "chosen", "KL", "best of the others", "its KL", "ratio"]
    return markdown(header, lines) if lines else NOT_MEASURED
