"""`eval/fine_tune.py`: what is learned of a row, and that a small model learns it."""

from __future__ import annotations

import json
import random

import pytest
from test_eval_scripts import script
from transformers import AutoModelForCausalLM, AutoTokenizer

from qattn_hf.assets import demo_model_dir

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'qattn-hf[eval]'")

fine_tune = script("fine_tune")
QUESTIONS = [{"question": f"What is {n} and {n}?", "answer": f"They make {2 * n}.\n#### {2 * n}"} for n in range(9)]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_model_dir())


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, QUESTIONS)), encoding="utf-8")
    return path


def learned(row):
    return [token for token in row.labels if token != fine_tune.IGNORED]


def test_rows_are_prompts_with_shots_and_the_answers_are_learned(tokenizer, file):
    rows = fine_tune.shots(tokenizer, file, 100, random.Random(0))
    # a first special token comes on top
    assert len(rows) > 1 and all(len(row.ids) <= 101 for row in rows)
    texts = [tokenizer.decode(row.ids, skip_special_tokens=True) for row in rows]
    assert all(text.startswith("Question: What is ") for text in texts)
    for one in QUESTIONS:  # as lm-eval's task writes a shot
        assert sum(f"Question: {one['question']}\nAnswer: {one['answer']}\n\n" in text for text in texts) == 1
    said = "".join(tokenizer.decode(learned(row)) for row in rows)
    assert all(f" {one['answer']}\n\n" in said for one in QUESTIONS) and "Question" not in said


def test_the_prompt_of_the_task_has_the_tokens_that_were_trained(tokenizer, file):
    (row,) = fine_tune.shots(tokenizer, file, 10_000, random.Random(0))
    text = tokenizer.decode(row.ids, skip_special_tokens=True)
    prompt = tokenizer(text[: text.rindex("Answer:") + len("Answer:")]).input_ids
    assert row.ids[: len(prompt)] == prompt


def test_calls_of_a_conversation_are_learned_and_its_end(tokenizer):
    row = fine_tune.one_conversation(7, 4096, str(demo_model_dir()))
    said = tokenizer.decode(learned(row))
    assert said.count('"arguments"') == 5 and said.endswith("}}" + tokenizer.eos_token)
    assert "batch" not in said and "parameters" not in said  # no result, no schema
    other = fine_tune.one_conversation(8, 4096, str(demo_model_dir()))
    assert other.ids != row.ids


def test_batches_hold_so_many_tokens_with_padding_and_every_row_once():
    rows = [fine_tune.Row([n] * n, [n] * n) for n in range(1, 40)]
    found = list(fine_tune.batches(rows, 64, random.Random(0)))
    assert sorted(len(row.ids) for batch in found for row in batch) == list(range(1, 40))
    assert all(len(batch) * max(len(row.ids) for row in batch) <= 64 for batch in found)


@pytest.mark.slow
def test_a_model_learns_and_is_written_as_a_folder(file, tmp_path, capsys):
    arguments = [str(demo_model_dir()), str(tmp_path / "out"), "--data", "gsm8k", "--train", str(file)]
    fine_tune.main([*arguments, "--epochs", "8", "--tokens", "512", "--device", "cpu", "--rate", "1e-3"])
    row = json.loads(capsys.readouterr().out)
    assert row["steps"] == 8 and row["loss_last"] < row["loss_first"] / 2  # nine short answers, eight times
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == AutoModelForCausalLM.from_pretrained(demo_model_dir()).dtype
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token


def test_the_training_split_has_to_be_named(capsys):
    with pytest.raises(SystemExit):
        fine_tune.main([str(demo_model_dir()), "out", "--data", "gsm8k"])
    assert "--train FILE" in capsys.readouterr().err
