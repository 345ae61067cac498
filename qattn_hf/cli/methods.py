"""`qattn methods`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


def methods() -> None:
    """List the methods, what each does, and its settings with their defaults."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from qattn_hf.methods import Method, get_method, list_methods

    def settings(title: str, summary: str, fields: dict[str, FieldInfo]) -> None:
        heading = Text(f"{title}: {summary}", "bold")
        table = Table("setting", "default", "what it is", title=heading, title_justify="left")
        for key, field in fields.items():
            table.add_row(key, str(field.get_default(call_default_factory=True)), Text(field.description or ""))
        console.print(table if fields else heading, "")

    console = Console()
    for name in list_methods():
        method = get_method(name)
        own = {key: field for key, field in method.model_fields.items() if key not in Method.model_fields}
        settings(name, (method.__doc__ or "").strip().splitlines()[0], own)
    settings("every method", "settings that all of them have", dict(Method.model_fields))
    print("Use one with --method NAME, change a setting with --set KEY=VALUE.")
