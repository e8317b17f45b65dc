"""The options that say what a planner may do, for every command that plans."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from ravnest.cli.common import find_parts, read_text

if TYPE_CHECKING:
    from ravnest.config import PlanConfig


@dataclass(frozen=True, slots=True)
class PlanWishes:
    """What the command line says of the plan."""

    config_file: str | None
    settings: tuple[str, ...]
    clusters: int | None
    favour: str | None

    def read(self, base: "PlanConfig | None" = None) -> "PlanConfig":
        """Return the settings of the file with those of the command line above them; others as in `base`."""
        from ravnest.config import parse_plan_table, read_plan_config

        values: dict[str, object] = {}
        if self.config_file is not None:
            content = read_text(self.config_file, find_parts().max_file_bytes)
            table = parse_plan_table(content, self.config_file)
            if table is None:
                told = f"note: {self.config_file} has no [plan] table; every setting has its default"
                click.echo(told, err=True)
            values = table or {}
        read_plan_config(values, f"{self.config_file}, table [plan]")
        given = self._read_settings()
        read_plan_config(given, "--set")
        named = {"clusters": self.clusters, "favour": self.favour}
        for name, value in named.items():
            if value is not None:
                given[name] = str(value)
                read_plan_config({name: str(value)}, f"--{name}")
        return read_plan_config({**values, **given}, "--set", base)

    def _read_settings(self) -> dict[str, str]:
        given: dict[str, str] = {}
        for setting in self.settings:
            key, sign, value = setting.partition("=")
            if not sign or not key.strip():
                raise click.UsageError(f"--set {setting!r} is not a setting; write KEY=VALUE like max_lag=4.")
            given[key.strip()] = value.strip()
        return given


def plan_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options to a command, which gets them as `wishes`."""

    @functools.wraps(command)
    def with_wishes(
        *args: Any,
        config_file: str | None,
        settings: tuple[str, ...],
        clusters: int | None,
        favour: str | None,
        **others: Any,
    ) -> None:
        command(*args, wishes=PlanWishes(config_file, settings, clusters, favour), **others)

    for option in (
        click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help=_SET),
        click.option("--config", "config_file", metavar="FILE", help=_CONFIG),
        click.option("--favour", type=click.Choice(["quality", "speed"]), help=_FAVOUR),
        click.option("--clusters", type=int, metavar="N", help=_CLUSTERS),
    ):
        with_wishes = option(with_wishes)
    return with_wishes


_SET = "One setting of the planner, above the file. Repeatable."
_CONFIG = "TOML file with a [plan] table of settings."
_FAVOUR = "What more clusters may cost: hardly any quality (the default), or a little for speed."
_CLUSTERS = "At most N copies of the model side by side, whatever that costs in quality; 0: as many as pay."
