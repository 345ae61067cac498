"""The task `qattn_tools`: its conversations, its scores, and how far a method answers as full precision does."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'qattn-hf[eval]'")

from transformers import AutoTokenizer

from qattn_hf.assets import demo_model_dir
from qattn_hf.errors import QAttnError
from qattn_hf.lm_eval import tool_calls
from qattn_hf.lm_eval.agreement import Answer, agreement, answers

DEMO = {"pretrained": str(demo_model_dir())}
STRICT = """{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}
{% for message in messages %}<{{ message.role }}>{{ message.content }}</{{ message.role }}>{% endfor %}<assistant>"""


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    # the embedded model's tokenizer has a token for few characters, so that its least conversation is long
    return list(tool_calls.conversations(lengths=[4096], samples=6, **DEMO)["test"])


def test_a_conversation_has_its_length_and_begins_with_what_is_asked_at_its_end(rows):
    tokenizer = AutoTokenizer.from_pretrained(demo_model_dir())
    assert len({row["input"] for row in rows}) == len(rows)
    for row in rows:
        head, *turns, last = row["input"].split("user: ")
        call = json.loads(row["target"])
        asked, person = tool_calls.TOOLS[call["name"]][0], last.splitlines()[-2].split()[-1].rstrip(".")
        assert asked.format(person) in last
        (record,) = [line for line in head.splitlines() if line.startswith(f"{person}: ")]
        assert all(f"{key} {json.dumps(value)}" in record for key, value in call["arguments"].items())
        assert row["target"] not in row["input"]  # the call itself was not made before
        earlier = [tool_calls.first_object(turn.partition("assistant: ")[2])["name"] for turn in turns]
        assert sorted(earlier) == sorted(tool_calls.TOOLS)
        tokens = len(tokenizer(row["input"], add_special_tokens=False).input_ids)
        assert 4096 - tool_calls.ANSWER - 40 < tokens <= 4096 - tool_calls.ANSWER  # a line of a result has fewer


def test_the_same_seed_gives_the_same_conversations(rows):
    again = tool_calls.conversations(lengths=[4096], samples=2, **DEMO)["test"]
    assert list(again) == rows[:2]


def test_what_cannot_be_made_is_refused_in_words():
    with pytest.raises(QAttnError, match="1000: lengths are of"):
        tool_calls.conversations(lengths=[1000], **DEMO)
    with pytest.raises(QAttnError, match="at least: take greater lengths"):
        tool_calls.conversations(lengths=[1024], **DEMO)
    with pytest.raises(QAttnError, match="131072 tokens: the model takes"):
        tool_calls.conversations(lengths=[131072], **DEMO)
    with pytest.raises(QAttnError, match="name a tokenizer"):
        tool_calls.conversations()


def test_a_template_that_refuses_the_system_gets_its_words_from_the_user():
    messages = [{"role": role, "content": text} for role, text in (("system", "A"), ("user", "B"), ("assistant", "C"))]
    tokenizer = AutoTokenizer.from_pretrained(demo_model_dir())
    tokenizer.chat_template = STRICT
    text = tool_calls.in_template(tokenizer, [*messages, {"role": "user", "content": "D"}])
    assert text.strip() == "<user>A\n\nB</user><assistant>C</assistant><user>D</user><assistant>"


def test_a_call_counts_if_it_is_exactly_right(rows):
    row = rows[0]
    right = json.loads(row["target"])
    key = next(key for key, value in right["arguments"].items() if isinstance(value, int))
    wrong = {**right, "arguments": {**right["arguments"], key: str(right["arguments"][key])}}
    score = tool_calls.tool_results
    assert score(row, [f" Sure: {row['target']} as asked"]) == {"acc": 1, "arguments": 1, "tokens_4096": 1}
    assert score(row, [json.dumps(wrong)]) == {"acc": 0, "arguments": pytest.approx(2 / 3), "tokens_4096": 0}
    for said in ("", "{", "[1]", '{"name": 1}', row["target"][:-2], json.dumps({**right, "name": "other"})):
        assert score(row, [said])["arguments"] == 0 == score(row, [said])["acc"]


def sample(doc: int, responses: list[Any], length: int | None = None, kind: str = "none") -> dict[str, Any]:
    return {
        "doc_id": doc,
        "filter": kind,
        "filtered_resps": responses,
        "doc": {} if length is None else {"length": length},
    }


def test_agreement_is_of_equal_answers_whatever_is_right():
    full = answers({"t": [sample(i, [text], 1024 << i // 2) for i, text in enumerate("abcdef")]})
    own = answers({"t": [sample(i, [text], 1024 << i // 2) for i, text in enumerate("abcdxf")]})
    found = agreement(own, full, "t", "none")
    assert found["agrees"] == pytest.approx(5 / 6) and found["agrees_stderr"] == pytest.approx((5 / 36 / 5) ** 0.5)
    assert found["agrees_by_length"] == {1024: 1, 2048: 1, 4096: 0.5} and found["holds_to"] == 2048
    assert agreement(own, full, "other", "none") == agreement({}, full, "t", "none") == {}
    bad = {place: Answer("z", answer.length) for place, answer in own.items()}
    assert agreement(bad, full, "t", "none")["holds_to"] == 0


def test_of_choices_the_likeliest_is_compared():
    def choices(*scores: float) -> dict[str, list[dict[str, Any]]]:
        return {"t": [sample(0, [(score, False) for score in scores])]}

    full, same, other = (answers(choices(*scores)) for scores in ((-1.0, -2.0), (-3.0, -4.0), (-4.0, -3.0)))
    assert agreement(same, full, "t", "none")["agrees"] == 1 and agreement(other, full, "t", "none")["agrees"] == 0
    greedy, not_greedy = ({"t": [sample(0, [(-1.0, flag)])]} for flag in (True, False))
    assert agreement(answers(greedy), answers(not_greedy), "t", "none")["agrees"] == 0
    assert answers({"t": [sample(0, [-5.0])]}) == {}  # a perplexity has no answer


def test_a_table_says_how_far_a_method_holds(capsys):
    from qattn_hf.lm_eval.tables import print_table

    row = {"method": "low2", "task": "qattn_tools", "metric": "acc", "filter": "none", "value": 0.5, "stderr": None}
    shares = {"agrees": 0.75, "agrees_by_length": {1024: 1.0, 2048: 0.5}, "holds_to": 1024}
    print_table([{**row, "n": 4, **shares}, {**row, "metric": "arguments", "n": 4, **shares}])
    said = capsys.readouterr().out
    assert said.count("low2, qattn_tools: holds to 1024 tokens (agrees: 1024 tokens 100%, 2048 tokens 50%)") == 1
    assert "75%" in said
