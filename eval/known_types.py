"""Families that people run, and which are served by `eval/results/models.json`: `python eval/known_types.py`."""

from __future__ import annotations

from pathlib import Path

from recorded import load
from table import NOT_MEASURED, markdown
from type_tables import RESULTS as WORDS
from type_tables import SERVED

# Names as people know them, with the model types that their checkpoints have, or whose modules those have.
KNOWN: dict[str, tuple[str, ...]] = {
    "Llama 3": ("llama",),
    "Llama 4": ("llama4_text",),
    "Mistral": ("mistral",),
    "Mixtral": ("mixtral",),
    "Ministral, Mistral 3": ("ministral", "ministral3"),
    "Qwen2.5": ("qwen2",),
    "Qwen3": ("qwen3",),
    "Qwen3-MoE": ("qwen3_moe",),
    "Qwen3-Next": ("qwen3_next",),
    "Qwen3.5": ("qwen3_5_text", "qwen3_5_moe_text"),
    "Gemma 2": ("gemma2",),
    "Gemma 3": ("gemma3_text",),
    "Gemma 3n": ("gemma3n_text",),
    "Gemma 4": ("gemma4_text",),
    "Phi-3, Phi-4": ("phi3",),
    "gpt-oss": ("gpt_oss",),
    "DeepSeek-V3, R1": ("deepseek_v3",),
    "DeepSeek-V3.2": ("deepseek_v32",),
    "Kimi K2": ("deepseek_v3",),
    "GLM-4.5, GLM-4.6": ("glm4_moe",),
    "GLM-5": ("glm_moe_dsa",),
    "Granite 4, hybrid": ("granitemoehybrid",),
    "Nemotron-H": ("nemotron_h",),
    "Falcon-H1": ("falcon_h1",),
    "LFM2": ("lfm2",),
    "SmolLM3": ("smollm3",),
    "OLMo 3": ("olmo3",),
    "EXAONE 4": ("exaone4",),
    "Command A (Cohere 2)": ("cohere2",),
    "MiniMax M2": ("minimax_m2",),
}


def known_table(results: Path) -> str:
    """One row a family; it counts as served where each of its types is.

    Raises:
        KeyError: a type of `KNOWN` that was not recorded.
    """
    found = next(iter(load(results, "models")), None)
    if found is None:
        return NOT_MEASURED
    said = {row["model_type"]: row["result"] for row in found["rows"]}
    served = sum(all(said[name] in SERVED for name in types) for types in KNOWN.values())
    rows = [
        [
            family,
            ", ".join(f"`{name}`" for name in types),
            ", ".join(dict.fromkeys(WORDS[said[name]] for name in types)),
        ]
        for family, types in KNOWN.items()
    ]
    intro = (
        f"{served} of {len(KNOWN)} families run and generate the stock model's tokens (`python eval/known_types.py`)."
    )
    return f"{intro}\n\n{markdown(['family', 'types', 'result'], rows)}"


if __name__ == "__main__":
    print(known_table(Path(__file__).resolve().parent / "results"))
