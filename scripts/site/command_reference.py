"""The page of all commands, made from the help of `ncr`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

HEAD = """# Commands

*For operators and researchers who look up a command or an option.*

`ncr COMMAND --help` prints the same text. After an error, the exit status is above 0, and standard
error has one line with the reason.
"""


def page(app: typer.Typer) -> str:
    """The Markdown page of a command and those below it."""
    root = typer.main.get_command(app)
    return HEAD + "".join(_commands(root, root.context_class(root, info_name="ncr")))


# Typer brings its own copy of click, so that commands and contexts have no type of one's own.
def _commands(command: Any, context: Any) -> Iterator[str]:
    if hasattr(command, "list_commands"):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if not below.hidden:
                yield from _commands(below, below.context_class(below, context, name))
        return
    usage = " ".join(command.get_usage(context).removeprefix("Usage: ").split())
    yield f"\n## `{context.command_path}`\n\n    {usage}\n\n{_paragraphs(command.help or '')}\n"
    if command.params:
        yield "\n| argument or option | default | meaning |\n|---|---|---|\n"
    for parameter in command.params:
        yield _row(parameter, context)


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _row(parameter: Any, context: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    if parameter.param_type_name == "argument":
        names = f"`{parameter.name}`"
    default = parameter.get_default(context, call=False)
    unset = default in (None, (), [], "") or callable(default)
    shown = "required" if parameter.required else "" if unset else f"`{default}`"
    return f"| {_cell(names)} | {_cell(shown)} | {_cell(parameter.help or '')} |\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
