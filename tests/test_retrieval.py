"""Retrieval: prompts, values found in an answer, and the loss of caches."""

from __future__ import annotations

import json
import random
import re
import sys

import pytest
import torch
from helpers import tiny_llama

from qattn_hf import QAttnError, patch, unpatch
from qattn_hf.fidelity.needles import KINDS, TEMPLATES, Prompt, PromptMaker, Question, all_prompts
from qattn_hf.fidelity.retrieval import Found, _found, answers, compare_retrieval, lost_won, retrieval_table, scores
from qattn_hf.model.loading import load
from qattn_hf.recipes.recipe import find_recipes

EIGHT = [100 * i / 7 for i in range(8)]


@pytest.fixture(scope="module")
def demo():
    loaded = load(None, "cpu")
    loaded.model.float()
    return loaded


def whole_length(prompt: Prompt) -> list[int]:
    """Tokens of the text with each question and its answer, or with all of them."""
    rooms = [len(question.ids) + question.room for question in prompt.questions]
    return [len(prompt.context) + room for room in ([sum(rooms)] if prompt.chained else rooms)]


@pytest.mark.parametrize("length", [400, 1003])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_prompts_have_their_length_and_needles_at_their_depths(demo, template: str, kind: str, length: int):
    maker, depths = PromptMaker(demo.tokenizer, template), [0, 60, 100]
    prompts = maker.prompts(kind, length, depths, seed=1)
    assert len(prompts) == (3 if kind == "single" else 1)
    form = TEMPLATES[template].listed if kind == "multikey" else TEMPLATES[template].hidden
    pattern = re.escape(form.needle).replace(r"\{key\}", r"[\w-]+").replace(r"\{value\}", r"(\d+)")
    found = []
    for prompt in prompts:
        longest = max(whole_length(prompt))
        assert longest == length or (kind == "multikey" and length - 5 < longest)  # by the longest question of all keys
        text = demo.tokenizer.decode(prompt.context)
        assert prompt.context[0] == demo.tokenizer.bos_token_id and form.head in text
        needles = list(re.finditer(pattern, text))
        filler = len(maker.tokens(re.sub(pattern, "", text))) - len(maker.tokens(f"<|bos|>{form.head}"))
        for question in prompt.questions:
            for value, depth in zip(question.values, question.depths, strict=True):
                [(i, needle)] = [(i, needle) for i, needle in enumerate(needles) if needle[1] == value]
                found.append(depth)
                if kind == "multikey":
                    assert i == round(depth / 100 * (len(needles) - 1))
                else:
                    before = re.sub(pattern, "", text[: needle.start()])
                    place = len(maker.tokens(before)) - len(maker.tokens(f"<|bos|>{form.head}"))
                    assert abs(place - depth / 100 * filler) < 6  # the longest sentence of the filler has 9 tokens
    assert found == depths


def test_a_question_asks_for_the_key_of_its_value(demo):
    maker = PromptMaker(demo.tokenizer, "pairs")
    [prompt] = maker.prompts("multikey", 500, EIGHT)
    lines = dict(
        line.split(": ") for line in demo.tokenizer.decode(prompt.context).split("Registry:\n")[1].splitlines()
    )
    keys = [demo.tokenizer.decode(q.ids).split(" of ")[1].split("?")[0] for q in prompt.questions]
    assert [lines[key] for key in keys] == [q.values[0] for q in prompt.questions] and len(set(keys)) == 8
    assert (keys[0], keys[-1]) == tuple(list(lines)[i] for i in (0, -1))
    [prompt] = PromptMaker(demo.tokenizer, "ruler").prompts("multivalue", 500, [10, 90])
    [question] = prompt.questions
    key = demo.tokenizer.decode(question.ids).split(" for ")[1].split(" in ")[0]
    assert [demo.tokenizer.decode(prompt.context).count(f"for {key} is: {value}.") for value in question.values] == [
        1,
        1,
    ]


def test_prompts_are_those_of_their_seed(demo):
    maker = PromptMaker(demo.tokenizer, "ruler", "A ship. A long road! Who knows? " * 9)
    for kind in KINDS:
        one, same, other = (maker.prompts(kind, 600, [20, 70], seed) for seed in (0, 0, 1))
        assert one == same != other
    assert random.Random("multikey 600 0").random() == pytest.approx(0.7741116762097529)  # in every process


@pytest.mark.parametrize(
    ("template", "kind", "length", "depths", "said"),
    [
        ("rules", "single", 500, [0], "template rules: there are ruler, pairs"),
        ("ruler", "double", 500, [0], "kind double: there are single"),
        ("ruler", "single", 500, [101], "0 to 100 per cent"),
        ("ruler", "multikey", 500, [50, 50], "different ones"),
        ("ruler", "single", 60, [50], "single: 60 tokens are too few"),
        ("ruler", "multikey", 200, EIGHT, "200 tokens are too few for 8 depths"),
        ("pairs", "multiquery", 4000, list(range(40)), "has not 40 different keys"),
    ],
)
def test_what_has_no_prompt_is_said(demo, template, kind, length, depths, said):
    with pytest.raises(QAttnError, match=said):
        PromptMaker(demo.tokenizer, template).prompts(kind, length, depths)


def test_a_length_that_an_error_names_suffices(demo):
    for kind, template in (("multiquery", "pairs"), ("multikey", "ruler"), ("multikey", "pairs")):
        maker = PromptMaker(demo.tokenizer, template)
        with pytest.raises(QAttnError, match="length of some") as raised:
            maker.prompts(kind, 30, EIGHT)
        least = int(str(raised.value).split("length of some ")[1].split()[0])
        assert maker.prompts(kind, least + 20, EIGHT)


def test_a_value_is_a_whole_number_of_the_answer():
    questions = [Question([1], ("1234", "77"), (0.0, 50.0), 9), Question([1], ("5",), (100.0,), 9)]
    prompt = Prompt("multivalue", 100, [1], questions, True)
    assert _found(prompt, [" 77, and 1234.", " 55"]) == Found([True, True, False], [0.0, 50.0, 100.0])
    assert _found(prompt, [" 12345 and 77", "5\n"]).hits == [False, True, True]


def test_scores_and_losses_are_counted_by_hand():
    full = [Found([True, True, False], [0.0, 50.0, 100.0]), Found([True, True, False], [0.0, 50.0, 100.0])]
    cache = [Found([True, False, True], [0.0, 50.0, 100.0]), Found([False, True, False], [0.0, 50.0, 100.0])]
    assert scores(full) == {"answers": 6, "score": 4 / 6, "by_depth": {"0": 1.0, "50": 1.0, "100": 0.0}}
    assert scores(cache)["by_depth"] == {"0": 0.5, "50": 0.5, "100": 0.5}
    assert lost_won(full, cache) == {"lost": 2, "won": 1}


def test_questions_follow_the_text_or_each_other(demo):
    maker, model = PromptMaker(demo.tokenizer, "pairs"), demo.model
    [listed] = maker.prompts("multikey", 300, [20, 80])
    texts, cache = answers(model, maker, listed)
    assert cache.get_seq_length() == len(listed.context)
    alone = [answers(model, maker, listed._replace(questions=[q]))[0][0] for q in listed.questions]
    assert texts == alone
    [hidden] = maker.prompts("multiquery", 300, [20, 80])
    _, cache = answers(model, maker, hidden)
    assert cache.get_seq_length() == 300 - len(hidden.questions)  # the last token of an answer is not read


@pytest.mark.slow
def test_a_coarse_cache_loses_what_full_precision_finds(demo):
    maker = PromptMaker(demo.tokenizer, "pairs")
    coarse = "kivi:bits=2,group_size=128,residual_length=0"
    prompts = all_prompts(maker, ["multikey"], [500, 300], [0, 60])
    rows = compare_retrieval(
        demo.model, maker, find_recipes(["none", coarse]), prompts, chunk=500, dtype=torch.bfloat16
    )
    names = ["full precision", "none", coarse]
    assert [(row["length"], row["method"]) for row in rows] == [(n, name) for n in (300, 500) for name in names]
    for full, none in zip(rows[::3], rows[1::3], strict=True):
        assert full["score"] == none["score"] == 1 and full["answers"] == 2 and "lost" not in full
        assert (none["lost"], none["won"]) == (0, 0)
        assert none["effective_bits_total"] == pytest.approx(16, abs=0.1)
    lost = [row["lost"] for row in rows[2::3]]
    assert sum(lost) >= 1 and [row["score"] for row in rows[2::3]] == [1 - n / 2 for n in lost]
    assert not hasattr(demo.model, "_qattn")
    header, lines = retrieval_table(rows)
    assert header[1:3] == ["multikey, 300", "multikey, 500"] and lines[0][1:] == ["1.000", "1.000", "", ""]
    assert lines[2][1] == f"{1 - lost[0] / 2:.3f} -{lost[0]} +0" and lines[2][3] == f"{sum(lost)} of 4"


def test_what_cannot_be_judged_is_said(demo):
    maker, int8 = PromptMaker(demo.tokenizer, "pairs"), find_recipes(["int8"])
    with pytest.raises(QAttnError, match="prompts of 5000 tokens are longer than the model's context of 4096"):
        compare_retrieval(demo.model, maker, int8, maker.prompts("multikey", 5000, [50]))
    short = maker.prompts("multikey", 80, [50])
    with pytest.raises(QAttnError, match="turbo packed nothing of 80 tokens"):
        compare_retrieval(demo.model, maker, find_recipes(["turbo"]), short)
    patch(demo.model, method="int8")
    with pytest.raises(QAttnError, match="unpatch"):
        compare_retrieval(demo.model, maker, int8, short)
    unpatch(demo.model)


@pytest.mark.slow
def test_the_command(tmp_path, qattn):
    asked = ["retrieval", "--device", "cpu", "--lengths", "200", "--depths", "30,90", "--method", "int8"]
    asked += ["--dtype", "float32"]  # many CPUs have no products of bf16
    text = tmp_path / "filler.txt"
    text.write_text("The ship came home. The road was long. ")
    files = ("--text", str(text), "--output", str(tmp_path / "o.json"))
    code, out, _ = qattn(*asked, "--kinds", "multikey, single", "--json", *files)
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [(row["method"], row["kind"]) for row in rows] == [
        (name, kind) for kind in ("multikey", "single") for name in ("full precision", "int8")
    ]
    assert rows[0]["template"] == "pairs" and rows[2]["by_depth"].keys() == {"30", "90"} and rows[2]["answers"] == 2
    assert json.loads((tmp_path / "o.json").read_text())["rows"] == rows
    code, out, _ = qattn(*asked)
    assert code == 0 and "multikey, 200" in out and "values that only full precision found" in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--lengths", "1k"], "--lengths 1k: give numbers with commas"),
        (["--depths", "50,150"], "0 to 100 per cent"),
        (["--kinds", "needle"], "kind needle: there are single"),
        (["--template", "needle"], "template needle"),
    ],
)
def test_wrong_options_are_said_before_a_model_is_loaded(options, said, qattn, monkeypatch):
    module = sys.modules["qattn_hf.cli.retrieval"]  # in its package the function has this name
    monkeypatch.setattr(module, "load", lambda *args: pytest.fail("a model was loaded"))
    code, _, err = qattn("retrieval", *options)
    assert code == 2 and said in err


def test_a_tokenizer_without_bos_and_a_model_of_another_kind():
    """A random model finds nothing, and a cache loses nothing of it."""

    class Letters:
        bos_token_id = None

        def __call__(self, text, **how):
            return type("Encoded", (), {"input_ids": [ord(c) % 96 + 1 for c in text]})

        def decode(self, ids):
            return "".join(chr(31 + int(i)) if i > 1 else "~" for i in torch.as_tensor(ids).flatten())

    maker = PromptMaker(Letters(), "ruler")
    prompts = maker.prompts("single", 600, [50])
    assert len(prompts[0].context) < 600
    full, int8 = compare_retrieval(tiny_llama(), maker, find_recipes(["int8"]), prompts)
    assert full["score"] == int8["score"] == 0 and int8["lost"] == int8["won"] == 0
