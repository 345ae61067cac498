"""The command line `qattn`, one module for each command; an error becomes one line on stderr."""

from __future__ import annotations

import sys

import typer

from qattn_hf.cli._older import in_todays_grammar
from qattn_hf.cli.bench import bench
from qattn_hf.cli.cache import cache
from qattn_hf.cli.compare import compare
from qattn_hf.cli.demo import demo
from qattn_hf.cli.doctor import doctor
from qattn_hf.cli.eval import evaluate
from qattn_hf.cli.generate import generate
from qattn_hf.cli.inspect import inspect
from qattn_hf.cli.methods import methods
from qattn_hf.cli.plan import plan
from qattn_hf.cli.retrieval import retrieval
from qattn_hf.cli.rollout import rollout
from qattn_hf.cli.serve import serve
from qattn_hf.cli.tune import tune

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
for command in (demo, methods, doctor, plan, generate, serve, compare, rollout, retrieval, tune, inspect):
    app.command()(command)
app.command("eval")(evaluate)
app.add_typer(bench, name="bench")
app.add_typer(cache, name="cache")


@app.callback(invoke_without_command=True)
def qattn(
    context: typer.Context,
    debug: bool = typer.Option(False, "--debug", help="Show the full traceback of an error."),
    version: bool = typer.Option(False, "--version", help="Show the version and exit."),
) -> None:
    """Packed KV caches for Hugging Face models.

    Start with `qattn demo`, which needs no download. `qattn COMMAND --help` explains a command.

    MODEL is a folder or a hub name, and the first argument. Without MODEL, most commands take a bundled small model.
    """
    if version:
        from qattn_hf._version import __version__

        print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def one_line(error: BaseException) -> str:
    """The first paragraph of an error's message as one line; the name of its class if it has no message."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}"
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    return " ".join(message.strip().split("\n\n")[0].split()) or type(error).__name__


def exit_code(error: BaseException) -> int:
    """Exit code of an error: 2 for an invalid option, method or setting, 1 where the work failed."""
    if isinstance(usage := getattr(error, "exit_code", None), int):
        return usage  # without importing torch
    from qattn_hf.errors import RecipeError

    return 2 if isinstance(error, RecipeError) else 1


def main(arguments: list[str] | None = None) -> None:
    """Run `qattn`; an error becomes one line on stderr and its `exit_code`, unless `--debug` asks for the traceback."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = app(in_todays_grammar(arguments), prog_name="qattn", standalone_mode=False)
    except Exception as error:
        if "--debug" in arguments:
            raise
        print(f"qattn: {one_line(error)}", file=sys.stderr)
        code = exit_code(error)
    sys.exit(code if isinstance(code, int) else 0)
