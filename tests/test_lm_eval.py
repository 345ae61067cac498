"""lm-eval's model `qattn`: what it scores and generates was read from packed tokens, as a hand-made loop reads it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'qattn-hf[eval]'")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from qattn_hf import RecipeError, patch
from qattn_hf.assets import configs_dir, demo_model_dir
from qattn_hf.cli._prompts import PROSE
from qattn_hf.errors import QAttnError
from qattn_hf.lm_eval.model import QAttnLM
from qattn_hf.reading.chunks import cuts, feed

WORDS = PROSE.split(" ")
LONG, MIDDLE, SHORT = (" ".join(WORDS[:n]) for n in (150, 110, 4))


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(demo_model_dir(), dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(demo_model_dir())


@pytest.fixture
def lm(loaded) -> Any:
    """Makes a `QAttnLM` around the one model, which is as it was afterwards."""
    from qattn_hf import unpatch

    model, tokenizer = loaded

    def make(**arguments: Any) -> QAttnLM:
        if hasattr(model, "_qattn"):
            unpatch(model)
        return QAttnLM(model, tokenizer=tokenizer, **{"batch_size": 4, **arguments})

    yield make
    if hasattr(model, "_qattn"):
        unpatch(model)


def asked(kind: str, *arguments: tuple, task: str = "task") -> list[Instance]:
    return [Instance(kind, {}, args, i, (task, i, 1)) for i, args in enumerate(arguments)]


def rolling(model: QAttnLM, text: str) -> float:
    return model.loglikelihood_rolling(asked("loglikelihood_rolling", (text,)), disable_tqdm=True)[0]


def scores(model: QAttnLM, *pairs: tuple[str, str]) -> list[tuple[float, bool]]:
    return model.loglikelihood(asked("loglikelihood", *pairs), disable_tqdm=True)


def by_hand(model: Any, tokens: list[int], chunk: int) -> float:
    """The sum of log-probabilities of `tokens` after the first, fed in chunks."""
    ids = torch.tensor([tokens])
    total = 0.0
    for part in feed(model, ids[:, :-1], cuts(len(tokens) - 1, chunk)):
        rows = part.logits[0].log_softmax(-1)
        total += rows.gather(1, ids[0, part.start + 1 : part.stop + 1, None]).sum().item()
    return total


@pytest.mark.slow
@pytest.mark.parametrize("method", [{"method": "turbo", "bits": 2}, {"method": "int8"}])
def test_rolling_score_is_a_hand_made_loop_through_the_cache(lm, method):
    harness = lm(chunk=32, **method)
    tokens = [harness.prefix_token_id, *harness.tok_encode(LONG)]
    assert rolling(harness, LONG) == pytest.approx(by_hand(harness.model, tokens, 32), abs=1e-3)


def test_a_rough_cache_is_seen_in_the_score_and_not_by_lm_evals_own_model(lm, loaded):
    """The trap: one call over the text never reads what was packed."""
    model, tokenizer = loaded
    full, packed = rolling(lm(), LONG), rolling(lm(method="turbo", bits=2, sink_num=0), LONG)
    stock = HFLM(model, tokenizer=tokenizer).loglikelihood_rolling(asked("loglikelihood_rolling", (LONG,)), True)[0]
    assert packed < full - 5 and abs(stock - full) < 1


@pytest.mark.slow
@pytest.mark.product("method1")
@pytest.mark.parametrize("method", [{}, {"method": "turbo"}, {"method": "kivi", "residual_length": 32}])
def test_rows_of_a_batch_score_as_they_do_alone(lm, method):
    """Contexts padded on the left and continuations on the right, of rows that end in other chunks."""
    # Products of another shape round differently on some CPUs. A code that then falls the other way moves a sum by 0.01
    close = 0.03 if method else 1e-3
    pairs = [(LONG, " He"), (MIDDLE, " and he had not opened it."), (PROSE, " had come " * 40)]
    model = lm(chunk=40, **method)
    together = scores(model, *pairs)
    alone = [scores(model, pair)[0] for pair in pairs]
    for (value, greedy), (one, greedy_alone) in zip(together, alone, strict=True):
        assert value == pytest.approx(one, abs=close) and greedy == greedy_alone


@pytest.mark.slow
def test_choices_of_one_token_share_a_row_and_the_likeliest_is_greedy(lm):
    model = lm(method="turbo")
    found = scores(model, (LONG, " the"), (LONG, " had"), (LONG, " was"), (MIDDLE, " was"))
    assert model.usage.requests == 2
    assert [scores(model, (LONG, word))[0] for word in (" the", " had", " was")] == [
        pytest.approx(x) for x in found[:3]
    ]
    said = model.generate_until(asked("generate_until", (LONG, {"max_gen_toks": 1, "until": []})), disable_tqdm=True)[0]
    assert scores(model, (LONG, said))[0][1]


@pytest.mark.parametrize("method", [{"method": "turbo"}, {"method": "kivi"}])
def test_texts_too_short_to_be_packed_are_refused(lm, method):
    model = lm(**method)
    with pytest.raises(QAttnError, match=r"nothing was packed.*closes after (64|160).*method=full"):
        scores(model, (SHORT, " the"))
    with pytest.raises(QAttnError, match="nothing was packed"):
        rolling(model, SHORT)
    assert scores(lm(), (SHORT, " the")) == [pytest.approx(scores(lm(method="full"), (SHORT, " the"))[0])]


def test_a_task_is_refused_beside_another_that_packs(lm):
    both = asked("loglikelihood", (LONG, " the"), task="long") + asked("loglikelihood", (SHORT, " the"), task="short")
    with pytest.raises(QAttnError, match="nothing was packed"):
        lm(method="turbo").loglikelihood(both, disable_tqdm=True)


def test_results_say_how_much_was_read_from_packed_tokens(lm):
    model = lm(method="turbo", k_bits=4, v_bits=2)
    scores(model, (LONG, " the"), (SHORT, " the"))
    found = model.get_model_info()["qattn"]
    task = found["tasks"]["task"]
    assert (task["requests"], task["packed_requests"], task["scored"], task["scored_through_packed"]) == (2, 1, 2, 1)
    assert task["kv_bytes"] > 0 and 3 < task["effective_bits"] < 4 and task["tokens_per_second"] > 0
    assert found["recipe"]["v_bits"] == 2 and found["impl"] == "reference" and found["versions"]["lm_eval"]
    assert found["mode"].startswith("through the packed cache: texts in chunks of 61 tokens")
    assert "nothing packed" in lm(method="full").mode and "nothing packed" in lm(method="sage2", cache="model").mode


@pytest.mark.slow
def test_generate_until_is_generate_of_the_patched_model(lm, loaded):
    """Rows of other lengths, padded on the left, through one fresh cache a batch."""
    model, tokenizer = loaded
    harness = lm(method="turbo", bits=2, batch_size=2)
    options = {"max_gen_toks": 6, "until": ["\n\n"]}
    answers = harness.generate_until(asked("generate_until", (LONG, options), (MIDDLE, options)), disable_tqdm=True)
    for text, answer in zip((LONG, MIDDLE), answers, strict=True):
        inputs = tokenizer(text, return_tensors="pt")
        out = patch(model, method="turbo", bits=2).generate(**inputs, max_new_tokens=6, do_sample=False)
        wanted = tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        assert answer == wanted.split("\n\n")[0]
    usage = harness.usages["task"].to_dict()
    assert usage["requests"] == usage["packed_requests"] == 2 and usage["generated"] == 12


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "turbo"])
def test_tasks_share_batches_and_are_counted_apart(lm, monkeypatch, method):
    """Answers and usage equal a run task by task, in fewer calls of `generate`."""
    options = {"max_gen_toks": 5, "until": []}
    tasks = {"one": (LONG, LONG[9:]), "two": (MIDDLE,), "three": (LONG[30:],)}
    asked_of = {
        name: asked("generate_until", *((text, options) for text in texts), task=name) for name, texts in tasks.items()
    }
    apart, together = lm(method=method, batch_size=4), lm(method=method, batch_size=4)
    calls: list[int] = []
    generate = QAttnLM._model_generate

    def counted(self: QAttnLM, context: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(len(context))
        return generate(self, context, *args, **kwargs)

    monkeypatch.setattr(QAttnLM, "_model_generate", counted)
    wanted = [answer for some in asked_of.values() for answer in apart.generate_until(some, disable_tqdm=True)]
    assert calls == [2, 1, 1]
    calls.clear()
    found = together.generate_until([one for some in asked_of.values() for one in some], disable_tqdm=True)
    assert calls == [4] and found == wanted
    for name, texts in tasks.items():
        alone, mixed = apart.usages[name], together.usages[name]
        assert mixed.requests == alone.requests == len(texts) and mixed.seconds > 0
        counts = ("packed_requests", "tokens", "generated", "effective_bits", "batches")
        assert [getattr(mixed, one) for one in counts] == pytest.approx([getattr(alone, one) for one in counts])


@pytest.mark.slow
def test_a_batch_begins_with_an_empty_cache(lm):
    model = lm(method="turbo", batch_size=1)
    options = {"max_gen_toks": 4, "until": []}
    first, _, again = model.generate_until(
        asked("generate_until", (LONG, options), (MIDDLE, options), (LONG, options)), disable_tqdm=True
    )
    assert first == again


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "turbos"}, "did you mean 'turbo'"),
        ({"method": "turbo", "group_size": 32}, "unknown key 'group_size'"),
        ({"k_bits": 4}, "k_bits: settings of a method"),
        ({"method": "full", "bits": 4}, "bits: settings of a method"),
        ({"method": "turbo", "chunk": 0}, "chunk = 0"),
        ({"method": "turbo", "bits": 5}, "bits = 5"),
        ({"method": "turbo", "p_scale": "tile"}, "the method paper_turbo"),
    ],
)
def test_arguments_that_cannot_be_are_refused_with_the_key(lm, arguments, message):
    with pytest.raises(RecipeError, match=message):
        lm(**arguments)


def test_a_recipe_file_and_a_patched_model_are_taken(lm, loaded):
    found = lm(recipe=str(configs_dir() / "turbo_sink.yaml"), bits=2).recipe
    assert found.settings.sink_num and found.settings.bits == 2
    model, tokenizer = loaded
    assert QAttnLM(patch(model, method="int8"), tokenizer=tokenizer).recipe.method == "int8"
    assert QAttnLM(model, tokenizer=tokenizer, method="full").recipe is None and not hasattr(model, "_qattn")


def test_a_continuation_longer_than_max_length_is_refused_by_its_name(lm):
    model = lm(method="turbo", max_length=96)
    with pytest.raises(QAttnError, match=r"request 1: the continuation ' Once.*has \d{3} tokens, and max_length=96"):
        scores(model, (LONG, " the"), ("Once", " Once" + LONG * 2))
