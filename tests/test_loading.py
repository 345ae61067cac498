"""What the command line says of a folder that holds no model."""

from __future__ import annotations

import pytest

from qattn_hf.cli import main

COMMANDS = {
    "doctor": [],
    "generate": ["--prompt", "hi"],
    "plan": ["--gpu-memory", "24GiB"],
    "cache report": [],
    "bench generate": ["--device", "cpu"],
}


def said_of(capsys, command: str, model: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), *COMMANDS[command], model])
    out, err = capsys.readouterr()
    assert ended.value.code == 1 and not out
    return str(err.splitlines()[-1])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_of_gguf_is_told_how_to_be_converted(command, capsys, tmp_path):
    for name in ("model-Q8_0.gguf", "model-Q4_K_M.gguf", "README.md"):
        (tmp_path / name).touch()
    error = said_of(capsys, command, str(tmp_path))
    for words in ("GGUF", f"from_pretrained({str(tmp_path)!r}, gguf_file='model-Q4_K_M.gguf')", "save_pretrained"):
        assert words in error
    assert "model-Q8_0.gguf" in said_of(capsys, command, str(tmp_path / "model-Q8_0.gguf"))


def test_a_folder_without_a_config_is_named(capsys, tmp_path):
    error = said_of(capsys, "doctor", str(tmp_path))
    assert str(tmp_path) in error and "no config.json" in error and "save_pretrained" in error


def test_a_folder_without_a_tokenizer_is_told_how_to_save_one(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    error = said_of(capsys, "generate", str(tmp_path))
    assert str(tmp_path) in error and "Fix: save the model's tokenizer" in error


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_a_checkpoint_of_the_records_is_told_how_to_be_had(capsys, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    error = said_of(capsys, "doctor", name)
    assert f"python eval/checkpoints.py fetch {name}" in error
