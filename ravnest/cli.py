"""The command `ravnest`: reads files and flags, asks the pure parts, prints the answer.

Data goes to stdout, narration to stderr. An error is one sentence and an exit code of its own. Everything
heavy is imported inside the command that needs it, so that `--help` is quick.
"""

import contextlib
import errno
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ravnest.commands import join, train
from ravnest.errors import ConfigError, RavnestError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ravnest.config import PlanConfig
    from ravnest.plan.forecast import Forecast
    from ravnest.plan.types import ModelProfile, Plan, Swarm
    from ravnest.showing.inspection import Inspection

_MOST_BYTES = 1 << 29  # of a file; a million nodes take half of it
_INTERRUPTED = 130
_USUAL_STAGES = 3


def main() -> None:
    """Run the command line; the entry point of the installed program."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="backslashreplace"
            )  # a name this terminal cannot show is no reason to stop
    program(prog_name="ravnest")


class _Program(click.Group):
    """A group whose commands end with the exit code of the error they raise."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except RavnestError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(error.exit_code)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # click ends quietly when the reader has gone
            click.echo(f"error: {error.strerror or error}; make room or choose another place", err=True)
            ctx.exit(RavnestError.exit_code)
        except KeyboardInterrupt:
            click.echo("stopped", err=True)
            ctx.exit(_INTERRUPTED)


def _show_version(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        try:
            click.echo(f"ravnest {metadata.version('ravnest')}")
        except metadata.PackageNotFoundError:
            click.echo("ravnest, run from its source folder without being installed")
        ctx.exit()


@click.group(cls=_Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version.",
)
def program() -> None:
    """Train one model together on ordinary, unequal PCs over the internet.

    \b
    Exit codes: 0 fine, 1 failed, 2 wrong usage, 3 a file or value is not
    usable, 4 the hub cannot be reached, 5 it refuses, 6 the nodes cannot
    hold the model, 130 stopped by Ctrl-C.
    """


program.add_command(join)
program.add_command(train)


@dataclass(frozen=True, slots=True)
class _Answer:
    """Everything `plan` found out, for whoever shows it."""

    plan: "Plan"
    predicted: "Forecast"
    profile: "ModelProfile"
    swarm: "Swarm"
    config: "PlanConfig"
    advice: tuple[str, ...]


@program.command()
@click.option(
    "--nodes", metavar="FILE", help="Nodes file (TOML or JSON); docs/files.md shows how to write one."
)
@click.option(
    "--population", metavar="KIND:COUNT", help="Made-up nodes: home, fibre, campus or lan, like home:50."
)
@click.option(
    "--model",
    metavar="NAME|FILE",
    default="gpt2-xl",
    show_default=True,
    help="Built-in model or profile file.",
)
@click.option("--batch", type=int, metavar="N", help="Samples per batch of a built-in model.")
@click.option(
    "--seed", type=int, default=0, show_default=True, metavar="N", help="Of the search and the population."
)
@click.option("--config", "config_file", metavar="FILE", help="TOML file with a [plan] table of settings.")
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="One setting, above the file. Repeatable."
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object (ravnest.plan/1) instead of tables."
)
@click.option("--svg", "svg_file", metavar="FILE", help="Also draw the plan into this file.")
def plan(  # noqa: PLR0913 - click passes one argument per option
    nodes: str | None,
    population: str | None,
    model: str,
    batch: int | None,
    seed: int,
    config_file: str | None,
    settings: tuple[str, ...],
    as_json: bool,
    svg_file: str | None,
) -> None:
    """Decide who does what, and predict how fast it will be. Starts nothing.

    \b
    ravnest plan --nodes swarm.toml --model gpt2-xl --svg plan.svg
    ravnest plan --population home:50 --seed 1 --set activations=int8 --json
    """
    if (nodes is None) == (population is None):
        raise click.UsageError("Give either --nodes FILE or --population KIND:COUNT, one of the two.")
    if seed < 0:
        raise ConfigError(f"--seed {seed} is negative; choose 0 or more")
    config = _read_config(config_file, settings)
    profile = _read_model(model, batch)
    swarm = _read_nodes(nodes, population, seed)
    answer = _find_plan(profile, swarm, config, seed)
    if svg_file is not None:
        _write_picture(svg_file, answer)
    if as_json:
        _print_json(answer)
    else:
        _print_tables(answer)


def _find_plan(profile: "ModelProfile", swarm: "Swarm", config: "PlanConfig", seed: int) -> _Answer:
    from ravnest.plan.cluster import form_plan
    from ravnest.plan.forecast import forecast
    from ravnest.showing.report import advise, show_count

    click.echo(f"planning {profile.name} on {show_count(len(swarm.nodes), 'node')}, seed {seed}", err=True)
    found = form_plan(profile, swarm, config, seed)
    predicted = forecast(found, profile, swarm, config)
    return _Answer(found, predicted, profile, swarm, config, advise(found, profile, swarm, config))


def _read_nodes(nodes: str | None, population: str | None, seed: int) -> "Swarm":
    from ravnest.plan import populations
    from ravnest.plan.reading import read_swarm

    if nodes is not None:
        return read_swarm(_read_text(nodes), nodes)
    assert population is not None
    return populations.population(population, seed)


def _read_model(model: str, batch: int | None) -> "ModelProfile":
    from ravnest.plan.profiles import BUILTIN_NAMES, builtin_profile
    from ravnest.plan.reading import read_profile

    is_file = model not in BUILTIN_NAMES and (os.path.exists(model) or model.endswith((".toml", ".json")))
    if not is_file:
        return builtin_profile(model, batch)
    if batch is not None:
        raise click.UsageError(
            f"--batch goes with a built-in model; set samples_per_batch in {model} instead."
        )
    return read_profile(_read_text(model), model)


def _read_config(config_file: str | None, settings: tuple[str, ...]) -> "PlanConfig":
    from ravnest.config import read_plan_config

    values = {} if config_file is None else dict(_read_plan_table(config_file))
    read_plan_config(values, f"{config_file}, table [plan]")
    given: dict[str, str] = {}
    for setting in settings:
        key, sign, value = setting.partition("=")
        if not sign or not key.strip():
            raise click.UsageError(f"--set {setting!r} is not a setting; write KEY=VALUE like max_lag=4.")
        given[key.strip()] = value.strip()
    read_plan_config(given, "--set")
    return read_plan_config({**values, **given}, "--set")


def _read_plan_table(config_file: str) -> Mapping[str, object]:
    from ravnest.plan.tables import parse_table
    from ravnest.units import show_value

    values = parse_table(_read_text(config_file), config_file).values
    if "plan" not in values:
        click.echo(f"note: {config_file} has no [plan] table; every setting has its default", err=True)
    table = values.get("plan", {})
    if not isinstance(table, dict):
        raise ConfigError(f"{config_file}: key 'plan' is {show_value(table)}, not a table; write [plan]")
    return table


def _read_text(name: str) -> str:
    """Return what a file holds, or raise the sentence that says why it cannot be read."""
    try:
        with Path(name).open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ConfigError(f"{name} is larger than {_MOST_BYTES >> 20} MiB; give a smaller file")
        return content.decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{name} does not exist; check its name and folder") from None
    except IsADirectoryError:
        raise ConfigError(f"{name} is a folder; give a file inside it") from None
    except PermissionError:
        raise ConfigError(f"{name} may not be read by this user; change its permissions") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} is not text (byte {error.start} is no UTF-8); give a TOML or JSON file"
        ) from None
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}; give another file") from None


def _write_picture(name: str, answer: _Answer) -> None:
    from ravnest.showing.drawing import draw_plan

    _write_text("--svg", name, draw_plan(answer.plan, answer.predicted, answer.profile, answer.swarm))
    click.echo(f"picture written to {name}", err=True)


def _write_text(option: str, name: str, text: str) -> None:
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        reason = f"{option} {name} cannot be written: {error.strerror}"
        raise ConfigError(f"{reason}; give a file in a folder that exists and is yours") from None


def _print_json(answer: _Answer) -> None:
    from ravnest.showing.report import plan_to_dict

    report = plan_to_dict(
        answer.plan, answer.predicted, answer.profile, answer.swarm, answer.config, answer.advice
    )
    click.echo(_to_json(report))


def _to_json(document: Mapping[str, object]) -> str:
    return json.dumps(document, indent=2, sort_keys=True, allow_nan=False)


def _print_tables(answer: _Answer) -> None:
    from ravnest.showing.terminal import show_plan

    _print_parts(lambda width: show_plan(answer.plan, answer.predicted, answer.profile, answer.advice, width))


def _print_parts(show: Callable[[int], Iterable["RenderableType"]]) -> None:
    from rich.console import Console

    console = Console(markup=False, highlight=False, emoji=False)
    for part in show(console.width):
        console.print(part)


@program.command()
@click.argument("place", metavar="FILE.py:JOB")
@click.option("--cut", "num_stages", type=int, metavar="N", help="Equal stages to cut into; 3 if left out.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object (ravnest.inspect/1) instead of tables."
)
@click.option("--profile", "profile_file", metavar="FILE", help="Also write a profile for `plan --model`.")
def inspect(place: str, num_stages: int | None, as_json: bool, profile_file: str | None) -> None:
    """Show what a model becomes: its line, a cut, what providers run. Starts nothing, sends nothing.

    FILE.py is your own file, which is run; JOB is a ravnest.Job in it or a function that returns one, and may
    be left out if there is only one.

    \b
    ravnest inspect examples/tiny_gpt/model.py:job --cut 4
    ravnest inspect model.py --profile model.json
    ravnest plan --population home:20 --model model.json
    """
    if num_stages is not None and num_stages < 1:
        raise ConfigError(f"--cut {num_stages} is less than one stage; choose 1 or more")
    if profile_file is not None and not profile_file.endswith(".json"):
        raise ConfigError(f"--profile {profile_file} would hold JSON; give a name that ends in .json")
    from ravnest.showing.inspection import inspection_to_dict, named_profile, show_inspection

    found = _inspect(place, num_stages)
    if profile_file is not None:
        _write_text("--profile", profile_file, _to_json(named_profile(found)) + "\n")
        click.echo(f"profile written to {profile_file}", err=True)
    if as_json:
        click.echo(_to_json(inspection_to_dict(found)))
    else:
        _print_parts(lambda width: show_inspection(found, width))


def _inspect(place: str, num_stages: int | None) -> "Inspection":
    click.echo(f"running {place}", err=True)
    from ravnest.job.loading import load_job, users_code
    from ravnest.model.measure import measure
    from ravnest.showing.inspection import inspect_model

    with contextlib.redirect_stdout(sys.stderr):  # what the user's file prints is not our answer
        job = load_job(place)
        with users_code(place):
            job.first_batch()
        click.echo(f"capturing {job.name}", err=True)
        start = time.perf_counter()  # noqa: TID251 - a program may tell how long it took
        captured = job.capture()
    profile = measure(captured.blueprint, captured.batch_size)
    seconds = time.perf_counter() - start  # noqa: TID251 - as above
    click.echo(f"captured and measured in {seconds:.1f} s", err=True)
    if num_stages is None:
        num_stages = min(_USUAL_STAGES, profile.num_positions)
    return inspect_model(captured.blueprint, profile, captured.notes, num_stages)
