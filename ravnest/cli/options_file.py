"""`--config FILE`: what the options of a command are when the command line leaves them out.

A table of the TOML file has the name of the command, its keys are the long names of the options. A table that
names another command is for that one, so that one file may serve a hub and those who join it.
"""

from typing import Any

import click

from ravnest.foreign import Document, quote

_NEVER = {"config", "help"}


def find_options(command: click.Command, document: Document) -> dict[str, Any]:
    """Return the options in the command's table by the names of their parameters."""
    name = command.name or ""
    table = document.values.get(name)
    if table is None:
        return {}
    if not isinstance(table, dict):
        document.refuse((name,), f"is {quote(table)}, not a table; write [{name}]")
    known = {_key_of(each): each for each in command.params if not getattr(each, "hidden", False)}
    known = {key: each for key, each in known.items() if key not in _NEVER}
    plain = {key: key.replace("_", "-") for key in table}
    document.refuse_unknown((name,), [*known, *(key for key in plain if plain[key] in known)])
    return {
        _name_of(known[plain[key]]): _read_value(known[plain[key]], value, document, (name, key))
        for key, value in table.items()
    }


def _key_of(parameter: click.Parameter) -> str:
    """Return how a file names it: `hub-upload`, or of an argument what the usage calls it."""
    if isinstance(parameter, click.Argument):
        return {"place": "job"}.get(_name_of(parameter), _name_of(parameter))
    return max(parameter.opts, key=len).lstrip("-")


def _name_of(parameter: click.Parameter) -> str:
    assert parameter.name is not None
    return parameter.name


def _read_value(parameter: click.Parameter, value: object, document: Document, place: tuple[str, str]) -> Any:
    is_flag = bool(getattr(parameter, "is_flag", False))
    alone = getattr(parameter, "flag_value", None)  # what an option means that may come without a value
    is_switch = not is_flag and isinstance(alone, str)
    if isinstance(value, bool) != is_flag and not (is_switch and value is True):
        document.refuse(place, f"is {quote(value)}; write {'true or false' if is_flag else 'its value'}")
    if value is True and is_switch:
        return alone
    many = value if isinstance(value, list) else [value]
    is_many = getattr(parameter, "multiple", False)
    is_plain = all(isinstance(each, str | int | float) for each in many)
    if not is_plain or (isinstance(value, list) and not is_many):
        document.refuse(
            place, f"is {quote(value)}; write a text or a number{', or a list' if is_many else ''}"
        )
    return [str(each) for each in many] if is_many else value
