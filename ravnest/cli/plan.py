"""`ravnest plan`: which node would do what, and how fast it would be."""

import os
from dataclasses import asdict, dataclass
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
from ravnest.errors import ConfigError
from ravnest.units import show_count

if TYPE_CHECKING:
    from ravnest.config import PlanConfig
    from ravnest.hub.coordinator.events import JobGiven
    from ravnest.plan.forecast import Forecast
    from ravnest.plan.sharing import Sharing
    from ravnest.plan.types import ModelProfile, Plan, Swarm


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """Everything that `plan` found out."""

    plan: "Plan"
    predicted: "Forecast"
    profile: "ModelProfile"
    swarm: "Swarm"
    config: "PlanConfig"
    advice: tuple[str, ...]
    left_out: dict[str, int]  # spares, by reason
    sharing: "Sharing | None" = None  # if it is known how long the job is


@click.command()
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
    "--updates", type=int, metavar="N", help="Updates of the job: plan for the time to its quality."
)
@click.option(
    "--seed", type=int, default=0, show_default=True, metavar="N", help="Of the search and the population."
)
@click.option(
    "--hub-upload",
    default="40 Mbit/s",
    show_default=True,
    metavar="RATE",
    help="What the hub can send: samples, first weights and relay.",
)
@plan_options
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object (ravnest.plan/1) instead of tables."
)
@click.option("--svg", "svg_file", metavar="FILE", help="Also draw the plan into this file.")
def plan(  # noqa: PLR0913 - click passes one argument per option
    nodes: str | None,
    population: str | None,
    model: str,
    batch: int | None,
    updates: int | None,
    seed: int,
    hub_upload: str,
    wishes: PlanWishes,
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
    if updates is not None and updates < 1:
        raise ConfigError(f"--updates {updates} is no length of a job; choose 1 or more")
    config = wishes.read(base_plan(hub_upload))
    profile = read_model(model, batch)
    swarm = read_nodes(nodes, population, seed)
    click.echo(f"planning {profile.name} on {show_count(len(swarm.nodes), 'node')}, seed {seed}", err=True)
    if updates is None:
        answer = _find_plan(profile, swarm, config, seed)
    else:
        answer = _find_shared_plan(profile, swarm, config, seed, updates)
    if svg_file is not None:
        _write_picture(svg_file, answer)
    if as_json:
        click.echo(to_json(plan_report(answer)))
    else:
        print_plan(answer)


def base_plan(hub_upload: str) -> "PlanConfig":
    """Return what a plan assumes with a hub that can send so much."""
    from ravnest.config import read_plan_config

    return read_plan_config({"hub_bytes_per_second": hub_upload}, "--hub-upload")


def _find_plan(profile: "ModelProfile", swarm: "Swarm", config: "PlanConfig", seed: int) -> PlanAnswer:
    from ravnest.plan.forecast import forecast
    from ravnest.plan.formation import form_plan
    from ravnest.plan.infeasible import count_left_out
    from ravnest.views.plan_text import advise

    found = (find_parts().form_plan or form_plan)(profile, swarm, config, seed)
    predicted = forecast(found, profile, swarm, config)
    advice, left_out = advise(found, profile, swarm, config), count_left_out(found, profile, swarm, config)
    return PlanAnswer(found, predicted, profile, swarm, config, advice, left_out)


def _find_shared_plan(
    profile: "ModelProfile", swarm: "Swarm", config: "PlanConfig", seed: int, num_updates: int
) -> PlanAnswer:
    """Plan as a hub would for a job of so many updates."""
    from ravnest.hub.coordinator.events import JobGiven, JobSettings

    size = profile.samples_per_batch
    settings = JobSettings(
        num_samples=num_updates * size, num_validation=0, batch_size=size, epochs=1, rates=(1.0,), seed=seed
    )
    return plan_job(JobGiven(profile, config, settings, now=0.0), swarm)


def plan_job(given: "JobGiven", swarm: "Swarm") -> PlanAnswer:
    """Plan a job as a hub would with these nodes, or raise PlanError."""
    from ravnest.errors import PlanError
    from ravnest.hub.coordinator.events import MakePlan
    from ravnest.hub.coordinator.planner import SearchPlanner
    from ravnest.plan.forecast import forecast
    from ravnest.plan.infeasible import count_left_out
    from ravnest.views.plan_text import advise

    made = SearchPlanner(form=find_parts().form_plan).make_plan(given, MakePlan(1, swarm.nodes), 0.0)
    if made.plan is None:
        raise PlanError(made.shortage)
    profile = given.profile_microbatch(made.microbatches, made.sharing)
    config = given.configure_microbatch(made.microbatches, made.sharing)
    advice = advise(made.plan, profile, swarm, config)
    advice = (made.reason, *advice) if made.reason else advice
    predicted = forecast(made.plan, profile, swarm, config)
    left_out = count_left_out(made.plan, profile, swarm, config, is_limited=bool(made.reason))
    return PlanAnswer(made.plan, predicted, profile, swarm, config, advice, left_out, made.sharing)


def read_nodes(nodes: str | None, population: str | None, seed: int) -> "Swarm":
    """Return the nodes of a file, or of a made-up population."""
    from ravnest.plan import populations
    from ravnest.plan.files import read_swarm

    if nodes is not None:
        return read_swarm(read_text(nodes, find_parts().max_file_bytes), nodes)
    assert population is not None
    return populations.population(population, seed)


def read_model(model: str, batch: int | None) -> "ModelProfile":
    """Return a built-in profile, or that of a file."""
    from ravnest.plan.files import read_profile
    from ravnest.plan.profiles import BUILTIN_NAMES, builtin_profile

    is_file = model not in BUILTIN_NAMES and (os.path.exists(model) or model.endswith((".toml", ".json")))
    if not is_file:
        return builtin_profile(model, batch)
    if batch is not None:
        raise click.UsageError(
            f"--batch goes with a built-in model; set samples_per_batch in {model} instead."
        )
    return read_profile(read_text(model, find_parts().max_file_bytes), model)


def _write_picture(name: str, answer: PlanAnswer) -> None:
    from ravnest.views.plan_picture import draw_plan

    write_text("--svg", name, draw_plan(answer.plan, answer.predicted, answer.profile, answer.swarm))
    click.echo(f"picture written to {name}", err=True)


def plan_report(answer: PlanAnswer) -> dict[str, object]:
    """Return a plan as plain values for JSON."""
    from ravnest.views.plan_text import plan_to_dict

    facts = answer.plan, answer.predicted, answer.profile, answer.swarm, answer.config
    report = plan_to_dict(*facts, answer.advice, answer.left_out)
    report["sharing"] = None if answer.sharing is None else asdict(answer.sharing)
    return report


def print_plan(answer: PlanAnswer) -> None:
    """Print a plan as tables."""
    from ravnest.views.plan_text import show_plan

    facts = answer.plan, answer.predicted, answer.profile, answer.advice
    print_parts(lambda width: show_plan(*facts, width, answer.left_out))
