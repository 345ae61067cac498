"""A plugin for pytest over transformers' own tests: patches the models that they make, and prints a row for each test.

`eval/transformers_tests.py` runs it. `QATTN_METHOD` names the method; without it models stay as they are.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationMixin, PreTrainedModel

from qattn_hf import QAttnCache, patch
from qattn_hf.errors import QAttnError

METHOD = os.environ.get("QATTN_METHOD")
LONGEST_REASON = 300  # characters
MOST_STAND_INS = 20


def patched_first(name: str, owner: type) -> None:
    """Let method `name` of `owner` patch a model that can generate before it runs; each model once, when all is set."""
    stock = getattr(owner, name)

    @functools.wraps(stock)
    def method(model: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(model, PreTrainedModel) and model.can_generate() and not hasattr(model, "_qattn_seen"):
            object.__setattr__(model, "_qattn_seen", True)
            patch(model, METHOD, impl="reference", family=False)
        return stock(model, *args, **kwargs)

    setattr(owner, name, method)


def stand_ins(modules: list[str]) -> list[str]:
    """Import the modules that the tests share, with None for each name that this transformers does not have.

    Tests may be of another version. Those that need such a name then fail with stock models too, and do not count.

    Returns:
        the names.
    """
    names: list[str] = []
    for module in modules:
        while module not in sys.modules:
            try:
                importlib.import_module(module)
            except ImportError as error:
                missing = re.match(r"cannot import name '(\w+)' from '([\w.]+)'", str(error))
                if missing is None or len(names) == MOST_STAND_INS:
                    raise
                setattr(sys.modules[missing[2]], missing[1], None)
                names.append(f"{missing[2]}.{missing[1]}")
    return names


def padded_left(prepare: Any) -> Any:
    """Reverse the random masks of `prepare_config_and_inputs_for_generate`, which have padding on the right.

    Stock `generate` warns of such padding, and a patched model refuses it.
    """

    @functools.wraps(prepare)
    def prepared(self: Any, *args: Any, **kwargs: Any) -> Any:
        config, inputs = prepare(self, *args, **kwargs)
        mask = inputs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2 and not bool(mask[:, -1].all()):
            inputs["attention_mask"] = mask.flip(-1)
        return config, inputs

    return prepared


def same_caches(stock: Any) -> Any:
    """Extend `_check_caches_are_equal` to packed caches. They have no `keys` and `values`, so all tensors count."""

    @functools.wraps(stock)
    def check(self: Any, one: Any, other: Any) -> None:
        if not isinstance(one, QAttnCache):
            return stock(self, one, other)
        tensors, others = one.state_tensors(), other.state_tensors()
        assert tensors.keys() == others.keys()
        for name, (tensor, _) in tensors.items():
            torch.testing.assert_close(tensor, others[name][0], msg=f"{name} differs")

    return check


def same_length(stock: Any) -> Any:
    """`_check_past_key_values_for_generate` for packed caches: layers, rows and tokens, in place of shapes of keys."""

    @functools.wraps(stock)
    def check(self: Any, batch_size: int, past_key_values: Any, seq_length: int, config: Any) -> None:
        if not isinstance(past_key_values, QAttnCache):
            return stock(self, batch_size, past_key_values, seq_length, config)
        assert len(past_key_values.layers) == config.get_text_config(decoder=True).num_hidden_layers
        assert all(layer.batch == batch_size for layer in past_key_values.layers)
        assert int(past_key_values.get_seq_length()) == seq_length

    return check


def pytest_configure(config: pytest.Config) -> None:
    sys.path.insert(0, str(config.rootpath))
    names = stand_ins(["tests.causal_lm_tester", "tests.generation.test_utils"])
    print("\n" + json.dumps({"missing": names}), flush=True)
    if METHOD:
        patched_first("__call__", PreTrainedModel)
        patched_first("generate", GenerationMixin)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for cls in {item.cls for item in items if isinstance(item, pytest.Function)}:
        if hasattr(cls, "prepare_config_and_inputs_for_generate"):
            cls.prepare_config_and_inputs_for_generate = padded_left(cls.prepare_config_and_inputs_for_generate)
            cls._check_caches_are_equal = same_caches(cls._check_caches_are_equal)
            cls._check_past_key_values_for_generate = same_length(cls._check_past_key_values_for_generate)
            cls.has_attentions = False  # transformers' own switch for models that return no attention weights


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Function, call: pytest.CallInfo) -> Any:
    report = (yield).get_result()
    if call.when != "call" and report.outcome == "passed":
        return
    row = {"test": f"{item.cls.__name__}.{item.name}", "outcome": report.outcome, "reason": ""}
    if call.excinfo is not None:
        row |= {"reason": str(call.excinfo.value).strip()[:LONGEST_REASON], "statement": statement(call.excinfo)}
        if isinstance(call.excinfo.value, QAttnError):
            row["outcome"] = "refused"
    print("\n" + json.dumps(row), flush=True)


def statement(error: pytest.ExceptionInfo[BaseException]) -> str:
    """The innermost statement of a test that raised."""
    inside = [entry for entry in error.traceback if "tests" in Path(entry.path).parts]
    return str(inside[-1].statement).strip() if inside else ""
