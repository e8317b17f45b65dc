"""`ravnest simulate`: hours of a whole swarm in minutes, with the hub's own decisions."""

import time
from typing import TYPE_CHECKING

import click

from ravnest.cli.common import (
    PlanWishes,
    find_parts,
    plan_options,
    print_parts,
    read_text,
    to_json,
    write_text,
)
from ravnest.cli.plan import base_plan, read_model, read_nodes
from ravnest.errors import ConfigError
from ravnest.units import show_count

if TYPE_CHECKING:
    from ravnest.hub.coordinator.events import JobGiven
    from ravnest.plan.types import Swarm
    from ravnest.sim.churn import AnyChange
    from ravnest.sim.run import SimulationSettings
    from ravnest.sim.world import World

_MOST_HOURS = 24.0 * 30
_MOST_NOISE = 3.0  # a link is 20 times as slow, or as fast, one time in three
_MOST_AWAY = 3600.0  # seconds


@click.command()
@click.option(
    "--nodes", metavar="FILE", help="Nodes file (TOML or JSON); docs/files.md shows how to write one."
)
@click.option(
    "--population", metavar="KIND:COUNT", help="Made-up nodes: home, fibre, campus or lan, like home:1000."
)
@click.option(
    "--model",
    metavar="NAME|FILE",
    default="gpt2-xl",
    show_default=True,
    help="Built-in model or profile file.",
)
@click.option("--hours", type=float, default=1.0, show_default=True, help="Of virtual time.")
@click.option("--batch", type=int, default=512, show_default=True, metavar="N", help="Samples of an update.")
@click.option(
    "--updates", type=int, default=100_000, show_default=True, metavar="N", help="Of the whole job."
)
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Of everything made up.")
@click.option(
    "--churn",
    default="1",
    show_default=True,
    metavar="TIMES|FILE",
    help="Nodes go so many times as often as their uptimes say (0: never), or as a trace file says.",
)
@click.option(
    "--link-noise",
    type=float,
    default=0.0,
    show_default=True,
    metavar="SPREAD",
    help="Every link changes about every ten minutes, by exp(SPREAD x normal noise).",
)
@click.option(
    "--hub-upload", default="40 Mbit/s", show_default=True, metavar="RATE", help="What the hub can send."
)
@click.option(
    "--restart-hub", type=float, multiple=True, metavar="MINUTE", help="Kill the hub then. Repeatable."
)
@click.option(
    "--hub-away", type=float, default=5.0, show_default=True, metavar="SECONDS", help="For so long."
)
@click.option("--checkpoint-every", type=float, metavar="MINUTES", help="Keep the weights so often.")
@plan_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (ravnest.simulation/1).")
@click.option("--plot", "plot_file", metavar="FILE", help="Also draw curves over time into this file (SVG).")
def simulate(  # noqa: PLR0913 - click passes one argument per option
    nodes: str | None,
    population: str | None,
    model: str,
    hours: float,
    batch: int,
    updates: int,
    seed: int,
    churn: str,
    link_noise: float,
    hub_upload: str,
    restart_hub: tuple[float, ...],
    hub_away: float,
    checkpoint_every: float | None,
    wishes: PlanWishes,
    as_json: bool,
    plot_file: str | None,
) -> None:
    """Simulate a swarm that trains: its hub decides as a real one does. Starts nothing.

    \b
    ravnest simulate --population home:1000 --model gpt2-xl --hours 1 --plot swarm.svg
    ravnest simulate --nodes swarm.toml --churn trace.csv --restart-hub 30 --json
    """
    from ravnest.sim.run import SimulationSettings, make_job

    if (nodes is None) == (population is None):
        raise click.UsageError("Give either --nodes FILE or --population KIND:COUNT, one of the two.")
    _check_numbers(hours, batch, updates, seed, link_noise)
    if not 0.0 <= hub_away <= _MOST_AWAY:
        raise ConfigError(f"--hub-away {hub_away:g} is no time away; choose 0 to {_MOST_AWAY:g} seconds")
    wanted = SimulationSettings(
        hours,
        seed,
        batch,
        updates,
        checkpoint_seconds=None if checkpoint_every is None else 60.0 * checkpoint_every,
        restarts=tuple(60.0 * minute for minute in sorted(restart_hub)),
        away_seconds=hub_away,
    )
    config, profile = wishes.read(base_plan(hub_upload)), read_model(model, None)
    swarm = read_nodes(nodes, population, seed)
    click.echo(f"simulating {hours:g} h of {show_count(len(swarm.nodes), 'node')}, seed {seed}", err=True)
    changes = _read_changes(churn, swarm, seed, hours, link_noise)
    report = _run(make_job(profile, config, wanted), swarm, changes, wanted)
    if plot_file is not None:
        from ravnest.views.simulation import draw_simulation

        write_text("--plot", plot_file, draw_simulation(report))
        click.echo(f"curves written to {plot_file}", err=True)
    if as_json:
        click.echo(to_json(report))
    else:
        from ravnest.views.simulation import show_simulation

        print_parts(lambda _: show_simulation(report))


def _check_numbers(hours: float, batch: int, updates: int, seed: int, link_noise: float) -> None:
    if not 0.0 < hours <= _MOST_HOURS:
        raise ConfigError(
            f"--hours {hours:g} cannot be simulated; choose more than 0, {_MOST_HOURS:g} at most"
        )
    if not 1 <= batch <= 1_000_000:
        raise ConfigError(f"--batch {batch} is no number of samples; choose 1 to 1000000")
    if not 1 <= updates <= 1_000_000_000:
        raise ConfigError(f"--updates {updates} is no length of a job; choose 1 or more")
    if seed < 0:
        raise ConfigError(f"--seed {seed} is negative; choose 0 or more")
    if not 0.0 <= link_noise <= _MOST_NOISE:
        raise ConfigError(
            f"--link-noise {link_noise:g} cannot be simulated; choose 0 or more, {_MOST_NOISE:g} at most"
        )


def _read_changes(
    churn: str, swarm: "Swarm", seed: int, hours: float, link_noise: float
) -> "tuple[AnyChange, ...]":
    from ravnest.sim.churn import made_up_changes, made_up_link_changes, read_trace

    links = made_up_link_changes(swarm, seed, hours, link_noise)
    try:
        times = float(churn)
    except ValueError:
        return (*read_trace(read_text(churn, find_parts().max_file_bytes), churn, swarm), *links)
    if not 0.0 <= times <= 1e6:
        raise ConfigError(f"--churn {churn} is no number of times; choose 0 or more, or give a trace file")
    return (*made_up_changes(swarm, seed, hours, times), *links)


def _run(
    job: "JobGiven", swarm: "Swarm", changes: "tuple[AnyChange, ...]", wanted: "SimulationSettings"
) -> dict[str, object]:
    """Simulate; say now and then how far it is, and in the end what the hub took."""
    from dataclasses import replace

    from ravnest.sim.run import PARTS, run_simulation, simulation_report
    from ravnest.views.simulation import show_cost

    def watch(world: "World") -> None:
        minute = len(world.recorder.spans)
        if minute % 10 == 0 and minute:
            click.echo(f"{minute} min: {world.recorder.num_samples} samples trained", err=True)

    parts = replace(PARTS, clock=_cpu_seconds)
    world = run_simulation(job, swarm, changes, wanted, parts, watch)
    cost = world.cost
    told = show_cost(cost.seconds, cost.num_events, cost.planning_seconds, cost.longest, cost.longest_event)
    click.echo(told, err=True)
    return simulation_report(world, swarm, wanted)


def _cpu_seconds() -> float:
    return time.process_time()  # noqa: TID251 - what the hub costs is measured, and nothing decided by it
