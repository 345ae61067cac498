"""Random conversations with a cache, compared with a simple model of its content.

The simple model is the list of each row's tokens, and a fresh cache that reads them in one call. Whatever happened to a
cache, its next step must equal that of the fresh one bit for bit. Keys and values are made, because a model's would
depend on how its calls were split. `QATTN_HISTORIES=2000` plays that number of examples of each method. Without it,
methods whose rows store the same kinds of data as another method's are played less.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
from helpers import Case, case_id, feed, tiny_llama
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedModel

from qattn_hf import QAttnCache, UnsupportedError, list_methods, patch
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.layer.model_layer import ModelLayer
from qattn_kernels.layer.scores import Scores

EXAMPLES = os.environ.get("QATTN_HISTORIES")
MOST_ROWS, MOST_TOKENS, VOCABULARY = 4, 400, 50
HEADS, DIM = 2, 16
# queries, keys and values of each token of the vocabulary
TABLE = torch.randn(3, VOCABULARY, HEADS, DIM, generator=torch.Generator().manual_seed(0))
KINDS: list[Case] = [("turbo", {}), ("kivi", {"bits": 2}), ("sinkq", {}), ("int8", {})]
LIKE_THEM: list[Case] = [("turbo", {"bits": "mixed"}), *((x, {}) for x in list_methods() if (x, {}) not in KINDS)]


def read(cache: QAttnCache, ids: torch.Tensor) -> list[torch.Tensor]:
    """Feed tokens `[B, T]` to every layer of a cache in one call: outputs, or keys and values of the model's layers."""
    q, k, v = TABLE[:, ids].transpose(2, 3)
    out: list[torch.Tensor] = []
    for layer in cache.layers:
        if isinstance(layer, ModelLayer):
            out += layer.update(k, v)
        else:
            scores = Scores(DIM**-0.5, window=getattr(layer.spec, "sliding_window", 0))
            out.append(feed(layer, q, k, v, [ids.shape[1]], scores=scores))
    return out


class Conversation(RuleBasedStateMachine):
    """One cache and, in `rows`, the tokens of each of its rows.

    Attributes:
        model, folder: of all conversations with one method.
        longest: most tokens that the rows had since they were empty: crops are exact back to `crop_horizon` before.
    """

    model: PreTrainedModel
    folder: Path

    @initialize(rows=st.integers(1, 3), count=st.integers(1, 200), seed=st.integers(0, 99))
    def begin(self, rows: int, count: int, seed: int) -> None:
        self.cache, self.forks = QAttnCache.for_model(self.model), []
        self.cache.writer.note(self.model)
        self.rows, self.longest = torch.empty(rows, 0, dtype=torch.int64), 0
        self.append(count, seed)

    @rule(count=st.integers(1, 200), seed=st.integers(0, 99))
    def append(self, count: int, seed: int) -> None:
        count = min(count, MOST_TOKENS - self.rows.shape[1])
        if count:
            ids = torch.randint(VOCABULARY, (len(self.rows), count), generator=torch.Generator().manual_seed(seed))
            read(self.cache, ids)
            self.rows = torch.cat([self.rows, ids], 1)
            self.longest = max(self.longest, self.rows.shape[1])

    @rule(share=st.floats(0, 1))
    def crop(self, share: float) -> None:
        kept = max(1, self.longest - self.cache.packed[0].spec.window.horizon)
        drop = int(share * max(0, self.rows.shape[1] - kept))
        self.cache.crop(-drop)
        self.rows = self.rows[:, : self.rows.shape[1] - drop]

    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        rows = st.integers(0, len(self.rows) - 1)
        beams = torch.tensor(data.draw(st.lists(rows, min_size=len(self.rows), max_size=len(self.rows))))
        self.cache.reorder_cache(beams)
        self.rows = self.rows[beams]

    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.integers(0, len(self.rows) - 1), min_size=1, max_size=len(self.rows)))
        self.cache.batch_select_indices(rows)
        self.rows = self.rows[rows]

    @precondition(lambda self: 2 * len(self.rows) <= MOST_ROWS)
    @rule()
    def repeat(self) -> None:
        self.cache.batch_repeat_interleave(2)
        self.rows = self.rows.repeat_interleave(2, 0)

    @precondition(lambda self: self.rows.shape[1])
    @rule()
    def save_and_load(self) -> None:
        self.cache.save(self.folder / "cache", input_ids=self.rows)
        self.cache = QAttnCache.load(self.folder / "cache", model=self.model)
        assert torch.equal(self.cache.input_ids, self.rows)

    @rule()
    def fork(self) -> None:
        """Keep a copy, which no later write may change."""
        self.forks = [(copy.deepcopy(self.cache), self.rows, self.longest)]

    @precondition(lambda self: self.forks)
    @rule()
    def swap(self) -> None:
        """Go on with the copy, and keep what was gone on with."""
        other = (self.cache, self.rows, self.longest)
        (self.cache, self.rows, self.longest), self.forks = self.forks[0], [other]

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.rows, self.longest = self.rows[:, :0], 0

    def teardown(self) -> None:
        for cache, rows, _ in [(self.cache, self.rows, 0), *self.forks]:
            fresh = QAttnCache.for_model(self.model)
            if rows.shape[1]:
                read(fresh, rows)
            assert [int(layer.get_seq_length()) for layer in cache.layers] == [rows.shape[1]] * len(cache.layers)
            cache.check_whole()
            step = torch.arange(len(rows)).view(-1, 1)
            assert all(map(torch.equal, read(cache, step), read(fresh, step)))
            pairs = zip(cache.layers, fresh.layers, strict=True)
            assert all(stored(a) == stored(b) for a, b in pairs if type(a) is QAttnLayer)


class MixedConversation(Conversation):
    """A cache with sliding windows, which may refuse to be cropped: then nothing was changed."""

    @rule(share=st.floats(0, 1))
    def crop(self, share: float) -> None:
        before = self.rows
        try:
            super().crop(share)
        except UnsupportedError:
            assert self.rows is before


def stored(layer: QAttnLayer) -> dict[str, list]:
    """What a layer says of its rows, and the codes of their closed blocks."""
    state, closed = layer.state, int(layer.state["closed"].max())
    names = ("length", "closed", "open_start", "block_pos", "block_len")
    numbers = {name: state[name] if state[name].dim() == 1 else state[name][:, :closed] for name in names}
    codes = {
        name: tensor.narrow(spec.block_dim, 0, closed)
        for name, tensor in state.items()
        if (spec := layer.tensor_specs()[name]).block_dim is not None and name.endswith(("codes2", "codes4", "codes8"))
    }
    return {name: tensor.tolist() for name, tensor in (numbers | codes).items()}


def play(kind: type[Conversation], patched: PreTrainedModel, kept: Path, examples: int) -> None:
    class Played(kind):
        model, folder = patched, kept

    quick = settings(
        max_examples=int(EXAMPLES or examples), stateful_step_count=10, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    with torch.no_grad():
        run_state_machine_as_test(Played, settings=quick)


@pytest.mark.product("turbo")
@pytest.mark.parametrize("case", [*KINDS, *LIKE_THEM], ids=case_id)
def test_a_cache_is_what_its_rows_are(case, tmp_path):
    play(Conversation, patch(tiny_llama(), case[0], **case[1]), tmp_path, 20 if case in LIKE_THEM else 30)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", KINDS, ids=case_id)
def test_more_conversations(case, tmp_path):
    play(Conversation, patch(tiny_llama(), case[0], **case[1]), tmp_path, 100)


@pytest.mark.slow
@pytest.mark.parametrize("sliding", ["packed", "exact"])
@pytest.mark.parametrize(
    "case", [("turbo", {}), pytest.param(("kivi", {"bits": 2}), marks=pytest.mark.exhaustive)], ids=case_id
)
def test_windows_beside_full_attention(case, sliding, tmp_path):
    sizes = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)
    kinds = ["full_attention", "sliding_attention"] * 2
    config = Gemma2Config(**sizes, head_dim=DIM, num_hidden_layers=4, layer_types=kinds, sliding_window=20)
    model = patch(Gemma2ForCausalLM(config).eval(), case[0], sliding=sliding, **case[1])
    play(MixedConversation, model, tmp_path, 30)
