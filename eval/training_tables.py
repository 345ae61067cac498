"""Tables of `docs/training.md`: rewards of GRPO whose rollouts read an unpacked or a packed cache."""

from __future__ import annotations

from table import Table, each

SETTINGS = ("bf16", "int8", "turbo")

TABLES = (
    Table("grpo-rewards", "grpo-*",
          "| steps || {setting} |",
          "| {first} to {step} || {reward:.3f} |",
          each(lambda row: "reward" in row, first=lambda row: row["step"] - row["steps"] + 1),
          "setting", SETTINGS),
    Table("grpo-ends", "grpo-*",
          "| rollouts | accuracy before | after | KL to the policy | mean of abs(ratio - 1) |",
          "| `{setting}` | {accuracy_before:.3f} | {accuracy_after:.3f} | {kl:.5f} | {off:.4f} |",
          each(lambda row: "accuracy_after" in row)),
)  # fmt: skip
