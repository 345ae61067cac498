"""What changes a model's keys without being a weight or a field of its config: adapters that are on, and RoPE's
frequencies.

peft switches and scales adapters by plain attributes of the layers that it wraps, in models that it returns and in
those that transformers' `load_adapter` changed. Frequencies are buffers that no checkpoint has, so code that sets a
RoPE scaling after a model was loaded changes neither weights nor config.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from transformers import PreTrainedModel

from qattn_hf.model.decoder import decoder_of

CHANGING = ("dynamic", "longrope")  # kinds of RoPE whose frequencies follow the length of each call
ROUNDING = 1e-6  # of a frequency: devices round powers by some 1e-7 differently, any scaling changes percents
Setting = tuple[Any, ...]
Frequencies = dict[str, Any]  # `attention_scaling`, a number or None, and `inv_freq`, a list of numbers


class InForce(NamedTuple):
    """What is in force in a model's decoder.

    Attributes:
        adapters: which adapters change the output of a layer, in words, by the layer's name; without those that are
            off.
        rope: the frequencies of each RoPE by name: of a kind of `CHANGING` those before any length changes them.
        parameters: what the config says of the RoPE now, as text.
        first, setting: the first layer with adapters, and how it was set; None without one. A decode step compares
            it alone.
    """

    adapters: dict[str, str]
    rope: dict[str, Frequencies]
    parameters: str
    first: ref[torch.nn.Module] | None
    setting: Setting | None


_numbers: WeakKeyDictionary[torch.nn.Module, dict[str, tuple[Any, list[float]]]] = WeakKeyDictionary()


def in_force(model: PreTrainedModel) -> InForce:
    """What is in force in a model now. Walks over its modules, and waits for the device where it sees frequencies for
    the first time."""
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
    if first is None:
        return InForce(adapters, rope, parameters, None, None)
    return InForce(adapters, rope, parameters, ref(first), _setting(vars(first)))


def unchanged(then: InForce) -> bool:
    """Whether the first layer with adapters is set as it was: all that a decode step has the time to ask. peft switches
    all layers together."""
    if then.first is None:
        return True
    module = then.first()
    return module is not None and then.setting == _setting(vars(module))


def difference(theirs: dict[str, Any], ours: dict[str, Any]) -> str | None:
    """What differs between two models' `adapters` and `rope`, in words; None where nothing does."""
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
            return f"the frequencies {name} of the RoPE are others: give the model the scaling that it had"
    return None


def changed(then: InForce, now: InForce) -> str | None:
    """What changed in a model, in words; None where nothing did."""
    if found := difference(then._asdict(), now._asdict()):
        return found
    if then.parameters != now.parameters:
        return "its config has other rope_parameters: give it the scaling that it had"
    return None


def _modules(decoder: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Layers with adapters and modules with buffers, in order, with their names. What an adapter wraps is left out."""
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
    """Which adapters a layer has on, by the attributes of peft's layers; copies, since peft changes them in place."""
    active, merged, scaling = own["_active_adapter"], own.get("merged_adapters") or (), own.get("scaling")
    active = (active,) if isinstance(active, str) else tuple(active or ())
    return active, bool(own.get("_disable_adapters")), tuple(merged), {**scaling} if isinstance(scaling, dict) else None


def _effect(own: dict[str, Any]) -> str:
    """What a layer's adapters do to its output, in words; empty where they do nothing."""
    active, disabled, merged, scaling = _setting(own)
    if disabled:
        return ""
    if merged:
        return "merged " + " + ".join(sorted(merged))
    if scaling is None:
        return " + ".join(sorted(active))
    return " + ".join(f"{name} by {float(scaling[name]):g}" for name in sorted(active) if name in scaling)


def _inverse(own: dict[str, Any]) -> list[str]:
    """Names of the buffers with inverse frequencies, one for each type of layer that has its own."""
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
    """The numbers of a buffer, which are read from the device once."""
    version = 0 if tensor.is_inference() else tensor._version
    known, key = _numbers.setdefault(module, {}), (tensor.data_ptr(), tensor.dtype, version)
    if name not in known or known[name][0] != key:
        known[name] = key, [] if tensor.is_meta else tensor.detach().double().flatten().tolist()
    return known[name][1]


def _alike(a: Frequencies, b: Frequencies) -> bool:
    (x, y), (s, t) = ((rope["inv_freq"] for rope in (a, b)), (rope["attention_scaling"] for rope in (a, b)))
    alike = all(math.isclose(p, q, rel_tol=ROUNDING) for p, q in zip(x, y, strict=False))
    return len(x) == len(y) and alike and (s is t if None in (s, t) else math.isclose(s, t, rel_tol=ROUNDING))
