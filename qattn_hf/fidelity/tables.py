"""Results of `compare` as a table."""

from __future__ import annotations

from qattn_hf.fidelity.compare import Row
from qattn_hf.fidelity.tuned import ranges
from qattn_hf.messages import size
from qattn_hf.messages.console import print_figures, results_console

FIRST = 7  # number of columns up to the bytes of the cache


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Format results of `compare` as a header and lines of text.

    The first `FIRST` columns are the most important ones and fit a terminal of 80 characters. Cells have two lines. The
    second line has the standard error of KL and perplexity, or the worst layer below the average one. Rows that were
    not measured layer by layer have a dash there.

    Args:
        rows: as `compare` returns them.
    """

    def layers(row: Row, key: str, form: str) -> str:
        if "attention" not in row:
            return "-"
        return "\n".join(format(row["attention"][which][key], form) for which in ("average", "worst"))

    def error(value: float | None, form: str) -> str:
        return "" if value is None else f"\n({value:{form}})"

    header = ["", "method", "KL", "same\ntop-1", "bits,\nclosed", "bits,\nall", "KV"]
    header += ["RMS\nchange", "perplexity", "cosine", "relative\nL1", "RMSE", "computed by"]
    lines = []
    for row in rows:
        bits = [row["effective_bits"], row["effective_bits_total"]]
        lines.append(
            [
                "*" if row["pareto"] else "",
                row["method"],
                f"{round(row['kl'], 6) + 0.0:.6f}{error(row['kl_se'], '.6f')}",  # + 0.0: no sign before a zero
                f"{row['same_top1']:.4f}",
                *("-" if b is None else f"{b:.2f}" for b in bits),
                size(row["kv_bytes"]),
                f"{row['rms_change']:.4f}",
                f"{row['ppl_change_pct']:+.2f} %{error(row['ppl_change_se_pct'], '.2f')}",
                layers(row, "cosine", ".4f"),
                layers(row, "relative_l1", ".4f"),
                layers(row, "rmse", ".4f"),
                row["impl"],
            ]
        )
    return header, lines


def print_table(rows: list[Row], wide: bool = False) -> None:
    """Print the results of `compare` as a table, with an explanation of its columns.

    Args:
        rows: as `compare` returns them, each with the key `model`, a name.
        wide: whether to print all columns of `table` rather than the first `FIRST` columns.
    """
    console, first, (header, lines) = results_console(), rows[0], table(rows)
    console.print(
        f"{first['model']}: {first['rows']} rows of {first['tokens']} tokens, scored from token "
        f"{first['scored_from']}, perplexity in full precision {first['ppl_full']:.3f}"
    )
    if first["own_layers"]:
        console.print(
            f"{first['own_layers']} layers are not packed. KL and perplexity are of the whole model; errors of "
            f"attention, bits and KV are of the packed layers, {ranges([layer['layer'] for layer in first['layers']])}"
        )
    columns = len(header) if wide else FIRST
    print_figures(header[:columns], [line[:columns] for line in lines], ["method", "computed by"], wide)
    explained = "* on the Pareto front of KL and bits. In brackets standard errors over rows. Bits and KV: one row of "
    explained += f"{first['at_tokens']} tokens. "
    if wide:
        explained += "Cosine, relative L1 and RMSE: attention outputs on full precision's own inputs of each layer, "
        explained += "the average layer above the worst one."
    else:
        explained += f"Computed by: {', '.join(sorted({row['impl'] for row in rows}))}. All columns, with perplexity "
        explained += "and attention's errors: --wide, in Python print_table(rows, wide=True)."
    console.print(explained)
