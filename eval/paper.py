"""Reproduce a table or figure of a paper next to its own numbers: `python eval/paper.py NAME --model MODEL`.

    python eval/paper.py list                                  # the names, and what each shows
    python eval/paper.py sinkq_groups                          # with the paper's model
    python eval/paper.py sinkq_groups --model demo             # with the embedded model, in a minute
    python eval/record.py paper-sinkq-groups -- python eval/paper.py sinkq_groups --model MODEL --text FILE.txt

Texts are read through the packed cache, in chunks and then in steps, and in full precision. `--tasks` runs lm-eval's
tasks as well. The default is the paper's tasks with the paper's model, and no tasks with another model.

The command fails if a claim that the table requires does not hold in our numbers. Other claims that our numbers
contradict, and results that cannot be reproduced, are printed with the reason.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from papers.common import About, Run, finish

HERE = Path(__file__).resolve().parent / "papers"
DEMO = "demo"


def tables() -> dict[str, Any]:
    """Return the modules with an `ABOUT`, by name. `int_flash` and `sage2` are separate commands."""
    names = sorted(path.stem for path in HERE.glob("*.py") if "\nABOUT" in path.read_text(encoding="utf-8"))
    return {name: importlib.import_module(f"papers.{name}") for name in names}


def prepared(about: About, options: argparse.Namespace) -> Run | None:
    """The model with its text; None for tables that need no model.

    Raises:
        QAttnError: the text is too short. OSError: the hub's model is not here.
    """
    if not about.model:
        return None
    from qattn_hf.assets import demo_model_dir
    from qattn_hf.model.loading import load
    from qattn_hf.reading.texts import made_text, read_as, rows_of

    demo, own = options.model == DEMO, options.model is None
    source = str(demo_model_dir()) if demo else about.model if own else options.model
    name, model, tokenizer = load(None if demo else source, options.device, options.dtype)
    text = options.text.read_text(encoding="utf-8") if options.text else made_text(8 * options.rows * options.tokens)
    ids = rows_of(tokenizer, text, options.rows, options.tokens)
    tasks = list(about.tasks) if options.tasks is None and own else [t for t in (options.tasks or "").split(",") if t]
    return Run(
        DEMO if demo else name,
        model,
        tokenizer,
        read_as(ids, options.chunk, options.steps, options.batch),
        tasks,
        options.limit,
        options.data_dir,
        source,
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="A table or figure of a paper, next to our figures.")
    made.add_argument("name", help="of a table, or list")
    made.add_argument("--model", help="folder, hub name, or demo; by default the paper's")
    made.add_argument("--text", type=Path, help="what is read; made_text by default")
    made.add_argument("--rows", type=int, default=8, help="of the text")
    made.add_argument("--tokens", type=int, default=1024, help="of a row")
    made.add_argument("--chunk", type=int, default=61, help="tokens of a call")
    made.add_argument("--steps", type=int, default=32, help="last tokens of a row that are read one by one")
    made.add_argument("--batch", type=int, default=4, help="rows at once")
    made.add_argument("--tasks", help="of lm-eval, comma between; '' is none")
    made.add_argument("--limit", type=int, help="rows of each task")
    made.add_argument("--data-dir", type=Path, help="local data in place of the hub's")
    made.add_argument("--device", help="such as cuda:0")
    made.add_argument("--dtype", default="float32", help="precision of the model")
    return made


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    found = tables()
    if options.name == "list":
        for name, table in found.items():
            print(f"{name:20} {table.ABOUT.title}")
        return
    if options.name not in found:
        parser().error(f"no table {options.name!r}: choose from {', '.join(found)}")
    table = found[options.name]
    try:
        run = prepared(table.ABOUT, options)
    except OSError as error:
        sys.exit(f"{options.model or table.ABOUT.model} is not on this machine ({error}); name another with --model")
    if failed := finish(table, table.measure(run)):
        sys.exit("\n".join(["does not hold:", *failed]))


if __name__ == "__main__":
    main()
