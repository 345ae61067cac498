"""Decide how the decode steps of a patched model run: eagerly, as CUDA graphs, or compiled.

Steps of all three kinds launch kernels by plans (`qattn_kernels.launch.plan`), which needs no decision here. The
overrides of Transformers' methods are module-level functions, so that a patched model can be copied and pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from transformers import CompileConfig, GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMode

from qattn_hf.attention.attention import is_span
from qattn_hf.cache.cache import QAttnCache
from qattn_hf.errors import UnsupportedError
from qattn_hf.generate.cuda_graph import capture
from qattn_hf.generate.cuda_graph.graph import GraphedCall
from qattn_hf.generate.patched import Runner, patch_of
from qattn_hf.model._compat import CACHE
from qattn_hf.model.bound_method import BoundMethod
from qattn_hf.model.device import compiling
from qattn_hf.model.layer_kinds import HybridLayerSpec, ModelLayerSpec
from qattn_hf.model.tensor_parallel import shard_of

NOT_ASKED = "transformers did not ask for a compiled call"
ONE_KIND_EACH = "no two decode steps had the same kind of inputs"
# NCCL waits for captured steps to be freed before it ends a communicator, so capture is not the default here.
SPLIT = (
    "the model is split over processes, whose communicator a captured step would hold: decode='graph' captures steps, "
    "and release(model) frees them before destroy_process_group()"
)
# Modes that call the model directly, and modes that ask for its compiled call
DIRECT = (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE, GenerationMode.ASSISTED_GENERATION)
ASKING = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


class Call(NamedTuple):
    """What decides how the steps of one call of `generate` run.

    Attributes:
        mode: None for a caller that asks for the model's compiled call, as Transformers does in the modes `ASKING`.
        compile_config: the caller's own way to compile.
        plain: True if the caller wants no compiled calls.
    """

    mode: GenerationMode | None = None
    compile_config: CompileConfig | None = None
    plain: bool = False


def runner_of_model(
    model: PreTrainedModel, setting: str, own: Sequence[ModelLayerSpec | HybridLayerSpec] = ()
) -> Runner:
    """Decide at `patch` how the steps of a model run, unless a call of `generate` has a reason against it.

    Args:
        setting: the recipe's `decode`: `auto`, `graph`, `fused`, `compile` or `eager`.
        own: the unpacked layers, whose tensors are replaced by new tokens.

    Raises:
        UnsupportedError: the setting is `graph`, `fused` or `compile` and the model cannot be captured, or compiled.
    """
    if setting == "eager":
        return Runner("eager")
    moving = _moving(own) if own else None
    reason = moving or capture.why_not(model)
    if reason is None and setting != "graph" and shard_of(model).size > 1:
        reason = SPLIT
    if setting == "compile" and moving is None:
        return Runner("compile", reason)
    if reason is None:
        return Runner("fused" if setting == "fused" else "graph")
    if setting in (*capture.STRICT, "compile"):
        raise UnsupportedError(capture.refusal(reason, setting))
    return Runner("eager", reason)


def _moving(own: Sequence[ModelLayerSpec | HybridLayerSpec]) -> str:
    windows = all(isinstance(spec, ModelLayerSpec) and spec.window is not None for spec in own)
    hint = "; sliding='packed' packs windows, which can be" if windows else ""
    return f"{len(own)} unpacked layers ({own[0]}) cannot be captured{hint}"


def step_runner(model: PreTrainedModel, call: Call) -> Runner:
    """Decide how the decode steps of a call run, with the one reason that `report` gives.

    Warn if a forward hook prevents their capture."""
    patched = patch_of(model)
    usual = patched.runner
    if call.mode is not None and usual.how == "eager":
        return usual
    if call.mode is not None and (reason := _why_uncalled(call.mode, usual, call)):
        return Runner("eager", reason)
    if not whole_model(model):
        return Runner("eager", "it exits early, to draft for itself")
    if call.compile_config is not None:
        return Runner("compile", "the caller gave a compile_config")
    strict = patched.recipe.settings.decode in capture.STRICT
    if usual.captures and not strict and (hook := capture.python_hook(model)):
        reason = f"a replay would leave out the forward hook {hook}; decode='graph' captures what it does"
        patched.notices.of_eager(reason)
        return Runner(_without_capture(usual), reason)
    return usual


def _without_capture(runner: Runner) -> str:
    """Return how the steps of a runner run that are not captured."""
    return "compile" if runner.how == "compile" else "eager"


def _why_uncalled(mode: GenerationMode, usual: Runner, call: Call) -> str | None:
    """Return why a call of `generate` starts without captured or compiled steps, or None."""
    name = mode.value.replace("_", " ")
    if mode in DIRECT and usual.how == "compile":
        return f"{name} does not ask for compiled calls; decode='graph' captures its steps"
    if mode not in (*ASKING, *DIRECT):
        return f"{name} is not captured"
    return NOT_ASKED if mode in ASKING or call.plain or call.compile_config is not None else None


def whole_model(model: PreTrainedModel) -> bool:
    """Return whether a model runs all its layers.

    A model that exits early to draft for itself must not be captured: its graph would be mistaken for a whole step over
    the same tensors.
    """
    return model.config.get_text_config(decoder=True).num_hidden_layers == len(model._qattn.specs)


def run_steps(
    model: PreTrainedModel, generation_config: GenerationConfig, mode: GenerationMode, cache: QAttnCache
) -> None:
    """Prepare the model and the cache for the steps of a call of `generate`.

    In the modes `ASKING`, steps are eager until Transformers asks for the compiled call (`compiled_call`). In the modes
    `DIRECT`, an override of the model's call runs captured steps. On a GPU, warn about eager steps that the user did
    not ask for.
    """
    cache.replays, cache.captured_call = False, None
    compiled_by_user = _without_override(model)
    config = generation_config.compile_config
    runner = step_runner(model, Call(mode, config, bool(generation_config.disable_compile) or compiled_by_user))
    if runner.captures:
        cache.captured_call = _callable(model, runner, None, cache)
        # a module's `__call__` uses this attribute and skips its hooks
        model._compiled_call_impl = BoundMethod(captured_call, model)
        return
    cache.ran(*runner)
    if runner.why not in (None, NOT_ASKED) and model._qattn.device_type == "cuda":
        model._qattn.notices.of_eager(str(runner.why))


def _without_override(model: PreTrainedModel) -> bool:
    """Remove the override of an earlier call. Return whether the user compiled the model."""
    call = model.__dict__.get("_compiled_call_impl")
    if isinstance(call, BoundMethod):
        del model._compiled_call_impl
        return False
    return call is not None  # set by `model.compile()`


def captured_call(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """Override of a model's call during beam search and assisted generation: replay captured steps.

    Calls with masks that `generate` did not make run as usual.
    """
    cache, mask = kwargs.get(CACHE), kwargs.get("attention_mask")
    made = isinstance(mask, dict) or (mask is not None and is_span(mask))
    if args or not made or not isinstance(cache, QAttnCache) or compiling():
        return model._call_impl(*args, **kwargs)
    if (call := cache.captured_call) is None:
        return model._call_impl(*args, **kwargs)
    cache.captured_call = None  # an eager call of the model comes here again
    try:
        return call(**kwargs)
    finally:
        cache.captured_call = call


def compiled_call(model: PreTrainedModel, compile_config: CompileConfig | None) -> Callable:
    """Override of `get_compiled_call`: return the callable that runs decode steps, according to `step_runner`.

    Without this override, `generate` on a GPU would compile by itself, because the capacity is fixed.

    Raises:
        UnsupportedError: compiled steps without capture, over a cache with `memory`.
    """
    cache = patch_of(model).last.cache
    if cache is not None:
        cache.captured_call = None  # callers of this method use its result directly
    return _callable(model, step_runner(model, Call(compile_config=compile_config)), compile_config, cache)


def _callable(
    model: PreTrainedModel, runner: Runner, compile_config: CompileConfig | None, cache: QAttnCache | None
) -> Callable:
    """Return the callable of a runner: the model, its compiled call, or either one captured in CUDA graphs."""
    patched = patch_of(model)
    if cache is not None:
        not_yet = Runner(_without_capture(runner), ONE_KIND_EACH)
        cache.ran(*(not_yet if runner.captures else runner))  # a `GraphedCall` updates this when it runs
    if runner.how == "eager":
        return model.__call__
    if not runner.captures:
        if cache is not None and cache.bounded:
            raise UnsupportedError(
                "compiled steps alone make no room, and a cache with memory= needs some in time: leave compile_config "
                "out, and take decode='graph' or 'eager'"
            )
        return type(model).get_compiled_call(model, compile_config)
    compiled = None
    if runner.how == "compile":  # use a mode without CUDA graphs: Inductor makes none over a cache that the step writes
        compiled = type(model).get_compiled_call(model, CompileConfig(mode="default"))
    if cache is not None:
        cache.replays = True
    return GraphedCall(model, patched.pool, patched.recipe.settings.decode, compiled)
