"""Changes to a model's keys that its config does not show: active adapters, RoPE frequencies and trained weights.

Peft switches and scales adapters by plain attributes of the layers that it wraps. It does so in the models that it
returns, and in models changed by Transformers' `load_adapter`. RoPE frequencies are buffers that no checkpoint stores,
so code that scales RoPE after loading changes neither weights nor config.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from transformers import PreTrainedModel

from qattn_hf.model.decoder import decoder_of
from qattn_hf.saved.weights import Weights, seem_unchanged, trained, weights_of

CHANGING = ("dynamic", "longrope")  # kinds of RoPE whose frequencies depend on the length of each call
# relative tolerance of a frequency: devices round powers differently by about 1e-7; any scaling changes percents
ROUNDING = 1e-6
Setting = tuple[Any, ...]
Frequencies = dict[str, Any]  # `attention_scaling`, a number or None, and `inv_freq`, a list of numbers


class InForce(NamedTuple):
    """Active adapters, RoPE frequencies and changes of the weights of a model's decoder.

    Attributes:
        adapters: a description, by layer name, of the active adapters that change the layer's output.
        rope: the frequencies of each RoPE by name. For the kinds in `CHANGING`, the frequencies before any length
            changes them.
        parameters: the config's RoPE parameters now, as text.
        weights: the counts of changes of the weights of `decoder`.
        first, setting: the first layer with adapters and its setting; None without one. A decode step compares only
            this setting.
    """

    adapters: dict[str, str]
    rope: dict[str, Frequencies]
    parameters: str
    decoder: ref[torch.nn.Module]
    weights: Weights
    first: ref[torch.nn.Module] | None
    setting: Setting | None


_numbers: WeakKeyDictionary[torch.nn.Module, dict[str, tuple[Any, list[float]]]] = WeakKeyDictionary()


def in_force(model: PreTrainedModel) -> InForce:
    """Return what is in force in a model now.

    Walks over the model's modules, and waits for the device at the first read of each frequency buffer.
    """
    decoder = decoder_of(model)
    adapters: dict[str, str] = {}
    rope: dict[str, Frequencies] = {}
    first: torch.nn.Module | None = None
    for name, module in _modules(decoder):
        own = vars(module)
        if "_active_adapter" in own:
            first = module if first is None else first
            if on := _effect(own):
                adapters[name] = on
        else:
            rope |= {f"{name}.{buffer}": _frequencies(module, buffer) for buffer in _inverse(own)}
    parameters = str(getattr(decoder.config.get_text_config(decoder=True), "rope_parameters", None))
    known = adapters, rope, parameters, ref(decoder), weights_of(decoder)
    if first is None:
        return InForce(*known, None, None)
    return InForce(*known, ref(first), _setting(vars(first)))


def unchanged(then: InForce) -> bool:
    """Return whether the weights seem unchanged, and the first layer with adapters has its old setting.

    A decode step has no time for more, and peft switches all layers together.
    """
    decoder = then.decoder()
    if decoder is None or not seem_unchanged(decoder, then.weights):
        return False
    if then.first is None:
        return True
    module = then.first()
    return module is not None and then.setting == _setting(vars(module))


def difference(theirs: dict[str, Any], ours: dict[str, Any]) -> str | None:
    """Describe the difference between two models' `adapters` and `rope`; None if they are equal."""
    was, now = theirs["adapters"], ours["adapters"]
    if changed := sorted(name for name in {*was, *now} if was.get(name) != now.get(name)):
        name = changed[0]
        return (
            f"the adapters of {name} were {was.get(name, 'off')} and are {now.get(name, 'off')} here: set them as they "
            "were, as by model.set_adapter(...)"
        )
    was, now = theirs["rope"], ours["rope"]
    for name in sorted({*was, *now}):
        if name not in was or name not in now or not _alike(was[name], now[name]):
            return f"the RoPE frequencies {name} differ: restore the model's scaling"
    return None


def changed(then: InForce, now: InForce) -> str | None:
    """Describe what changed in a model; None if nothing did."""
    if found := difference(then._asdict(), now._asdict()):
        return found
    if then.parameters != now.parameters:
        return "its config has other rope_parameters: restore them"
    return "its weights were trained: read the tokens again" if trained(then.weights, now.weights) else None


def _modules(decoder: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield layers with adapters and modules with buffers, in order, with their names. Modules inside an adapter are
    skipped."""
    stack: list[tuple[str, torch.nn.Module]] = [("", decoder)]
    while stack:
        name, module = stack.pop()
        own = vars(module)
        if "_active_adapter" in own or own["_buffers"]:
            yield name, module
        if own["_modules"] and "_active_adapter" not in own:
            inner = [(f"{name}.{n}" if name else n, x) for n, x in own["_modules"].items() if x is not None]
            stack.extend(reversed(inner))


def _setting(own: dict[str, Any]) -> Setting:
    """Return a layer's active adapters, from the attributes of peft's layers. Values are copies, because peft changes
    them in place."""
    active, merged, scaling = own["_active_adapter"], own.get("merged_adapters") or (), own.get("scaling")
    active = (active,) if isinstance(active, str) else tuple(active or ())
    return active, bool(own.get("_disable_adapters")), tuple(merged), {**scaling} if isinstance(scaling, dict) else None


def _effect(own: dict[str, Any]) -> str:
    """Describe how a layer's adapters change its output; empty if they do not."""
    active, disabled, merged, scaling = _setting(own)
    if disabled:
        return ""
    if merged:
        return "merged " + " + ".join(sorted(merged))
    if scaling is None:
        return " + ".join(sorted(active))
    return " + ".join(f"{name} by {float(scaling[name]):g}" for name in sorted(active) if name in scaling)


def _inverse(own: dict[str, Any]) -> list[str]:
    """Return the names of the buffers with inverse frequencies: one for each type of layer with a separate RoPE."""
    names = [name for name in own["_buffers"] if name.endswith("inv_freq")]
    return [name for name in names if not name.endswith(("original_inv_freq", "long_inv_freq"))]


def _frequencies(module: torch.nn.Module, name: str) -> Frequencies:
    layers = name.removesuffix("inv_freq")  # such as `sliding_attention_`
    kind = getattr(module, "rope_type", "")
    kind = kind.get(layers.rstrip("_"), "") if isinstance(kind, dict) else kind
    changing = any(word in str(kind) for word in CHANGING)
    tensor = getattr(module, f"{layers}original_inv_freq" if changing else name)
    scaling = getattr(module, f"{layers}attention_scaling", None)
    return {
        "attention_scaling": None if scaling is None else float(scaling),
        "inv_freq": _read(module, name, tensor),
    }


def _read(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> list[float]:
    """Return the numbers of a buffer. They are read from the device only once."""
    version = 0 if tensor.is_inference() else tensor._version
    known, key = _numbers.setdefault(module, {}), (tensor.data_ptr(), tensor.dtype, version)
    if name not in known or known[name][0] != key:
        known[name] = key, [] if tensor.is_meta else tensor.detach().double().flatten().tolist()
    return known[name][1]


def _alike(a: Frequencies, b: Frequencies) -> bool:
    """Return whether two RoPEs have the same frequencies. On the meta device they have no numbers to compare."""
    (x, y), (s, t) = ((rope["inv_freq"] for rope in (a, b)), (rope["attention_scaling"] for rope in (a, b)))
    alike = all(math.isclose(p, q, rel_tol=ROUNDING) for p, q in zip(x, y, strict=False))
    same = (len(x) == len(y) or not (x and y)) and alike
    return same and (s is t if None in (s, t) else math.isclose(s, t, rel_tol=ROUNDING))
