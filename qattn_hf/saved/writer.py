"""Identity of the model that wrote a cache: its config, a sample of its weights, and what is in force in it.

A file is refused for any other model.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from qattn_hf.errors import UnsupportedError
from qattn_hf.messages import shown
from qattn_hf.model.decoder import decoder_of
from qattn_hf.model.device import device_of
from qattn_hf.saved.in_force import InForce, changed, in_force, unchanged
from qattn_hf.saved.in_force import difference as in_force_difference

SAMPLE = 64  # numbers sampled per weight, evenly spread; takes milliseconds for hundreds of weights
# fields of a config that change no key and no value
INERT = (
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "transformers_version",
    "use_cache",
)  # fmt: skip


class Writer:
    """Weak reference to the model whose calls wrote a cache. Pickles of the cache omit it.

    Attributes:
        in_force: adapters, RoPE and changes of weights of the model at the first call; None if unknown.
    """

    def __init__(self) -> None:
        self._module: weakref.ref[torch.nn.Module] | None = None
        self.in_force: InForce | None = None

    @property
    def model(self) -> Any:
        """The model, or its decoder; None before a call and after the model was freed."""
        return None if self._module is None else self._module()

    def note(self, module: torch.nn.Module) -> None:
        """Set `module` as the writer: a patched model, or its decoder."""
        self._module = weakref.ref(module)

    def __deepcopy__(self, memo: Any) -> Writer:
        twin = Writer()
        twin._module, twin.in_force = self._module, self.in_force
        return twin

    def __reduce__(self) -> Any:
        return Writer, ()


def check_writer(cache: Any, module: PreTrainedModel, tokens: int) -> None:
    """Check that `module`, a model or its decoder, may continue a cache with a call of `tokens` tokens.

    It must be the writer or have the same weights. Its weights, adapters and RoPE must be unchanged. For an empty
    cache, they are recorded. Comparing the weights of two models takes a few milliseconds. If the writer was
    freed, nothing is compared. A one-token call compares little (`in_force.unchanged`).

    Raises:
        UnsupportedError: another model wrote the cache; weights are offloaded and cannot be compared; or weights,
            adapters or RoPE have changed.
    """
    writer, then = cache.writer.model, cache.writer.in_force
    written = writer is not None and any(layer.edits for layer in cache.layers)
    ours = written and (_one_patch(writer, module) or decoder_of(writer) is decoder_of(module))
    if tokens == 1 and ours and then is not None and unchanged(then):
        return
    now = in_force(module)
    if ours and then is not None and (found := changed(then, now)):
        raise UnsupportedError(
            f"keys of this cache were written before the model changed ({found}); or pass "
            "QAttnCache.for_model(model), or none. Nothing was changed"
        )
    if written and not ours and (found := difference(identity(writer), identity(module))):
        raise UnsupportedError(
            f"another model wrote this cache ({found}): pass QAttnCache.for_model(model), or none. Nothing was changed"
        )
    cache.writer.in_force = now


def _one_patch(writer: torch.nn.Module, module: torch.nn.Module) -> bool:
    """Return whether one `patch` marked both modules, as for a model and its decoder. Fast enough for every step."""
    return (mark := vars(writer).get("_qattn")) is not None and mark is vars(module).get("_qattn")


def identity(model: PreTrainedModel) -> dict[str, Any]:
    """Return a model's identity: `config`, `dtype`, `weights`, `adapters` and `rope`, as JSON values.

    `config` is the decoder's config without its class's defaults. `weights` is a SHA-256 over names, dtypes and shapes
    of the decoder's weights, and over `SAMPLE` numbers of each. For quantized weights it covers their codes. It detects
    another training, but not a change of a few single numbers. `adapters` and `rope` are fields of `InForce`. Effects
    of forward hooks are not covered.

    Raises:
        UnsupportedError: accelerate offloads weights, so they cannot be read.
    """
    decoder = decoder_of(model)
    config = decoder.config.get_text_config(decoder=True).to_diff_dict()
    config = json.loads(json.dumps({n: value for n, value in config.items() if n not in INERT}, default=str))
    # compressed-tensors records there that a first call unpacked the quantized weights
    (config.get("quantization_config") or {}).pop("quantization_status", None)
    now = in_force(decoder)
    return {
        "config": config,
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "weights": _sampled(decoder),
        "adapters": now.adapters,
        "rope": now.rope,
    }


def _sampled(decoder: PreTrainedModel) -> str:
    digest = hashlib.sha256()
    for name, weight in _weights(decoder):
        if weight.is_meta:
            raise UnsupportedError(
                f"the weight {name} is offloaded and cannot be compared, so no cache is saved, loaded or shared with "
                "another model: keep the weights on their devices"
            )
        numbers = weight.detach().reshape(-1)[:: max(1, weight.numel() // SAMPLE)]
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(numbers.contiguous().view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


def _weights(decoder: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of a checkpoint with their names. Quantizers store codes in either."""
    for prefix, module in decoder.named_modules():
        own = vars(module)
        buffers = {n: b for n, b in own["_buffers"].items() if n not in own["_non_persistent_buffers_set"]}
        for name, weight in {**own["_parameters"], **buffers}.items():
            if weight is not None:
                yield from _inside(f"{prefix}.{name}".lstrip("."), weight)


def _inside(name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the plain tensors inside a tensor subclass, whose operations may differ from a tensor's."""
    if not is_traceable_wrapper_subclass(weight):
        yield name, weight
        return
    for part in weight.__tensor_flatten__()[0]:
        yield from _inside(f"{name}.{part}", getattr(weight, part))


def difference(theirs: dict[str, Any], ours: dict[str, Any]) -> str | None:
    """Describe the difference between two identities; None if they are equal."""
    if theirs["dtype"] != ours["dtype"]:
        return f"it was {theirs['dtype']} and is {ours['dtype']} here: load it with dtype={theirs['dtype']}"
    names = sorted({*theirs["config"], *ours["config"]})
    pairs = {name: (theirs["config"].get(name), ours["config"].get(name)) for name in names}
    if other := [f"{name} {shown(a)} there and {shown(b)} here" for name, (a, b) in pairs.items() if a != b]:
        return ", ".join(other[:3])
    if found := in_force_difference(theirs, ours):
        return found
    return None if theirs["weights"] == ours["weights"] else "the same config with other weights"


def layer_devices(model: PreTrainedModel, layers: int) -> list[torch.device]:
    """Return the device of each layer, by the `layer_idx` of its attention. A model may be split
    over several devices."""
    found: dict[int, torch.device] = {}
    for module in decoder_of(model).modules():
        index, weight = getattr(module, "layer_idx", None), next(module.parameters(), None)
        if isinstance(index, int) and weight is not None:
            found.setdefault(index, weight.device)
    return [found.get(i, device_of(model)) for i in range(layers)]
