"""`ravnest finetune`: adapters for a Hugging Face model, on one's own text, with peers here or elsewhere."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from ravnest.cli.common import PlanWishes, dashboard_options, plan_options, report, to_json
from ravnest.cli.plan import PlanAnswer, base_plan, plan_job, plan_report, print_plan, read_nodes
from ravnest.cli.train import HubPlace, RunWishes, serve_hub, train_here
from ravnest.errors import ConfigError
from ravnest.units import show_bytes, show_count, show_seconds

if TYPE_CHECKING:
    from ravnest.requester.finetuning.finetune import Finetuning

_SCHEMA = "ravnest.finetune/1"
_LISTEN = "0.0.0.0:7700"
_USUAL_POPULATION = "home:8"
_MERGED = "merged"

_TRAINING = (
    click.option("--data", metavar="FILE", required=True, help=".jsonl, .csv or .parquet to train on."),
    click.option("--val-data", metavar="FILE", help="To validate with; a share of --data if left out."),
    click.option("--val-share", type=float, metavar="X", help="Share for that; 0.05 of 20 rows or more."),
    click.option("--columns", metavar="A=B,C=D", help="Your names: prompt=question,completion=answer."),
    click.option(
        "--max-length", type=int, metavar="N", help="Tokens of a row; 1024 if the model has so many."
    ),
    click.option("--pack", is_flag=True, help="Put several short texts into one row."),
    click.option("--rank", type=int, metavar="N", help="Of the adapters; 16 if left out."),
    click.option("--alpha", type=float, metavar="X", help="Their scale; twice the rank if left out."),
    click.option("--dropout", type=float, metavar="X", help="On what goes into adapters; none if left out."),
    click.option("--targets", metavar="A,B", help="Modules that get one; all linear ones if left out."),
    click.option("--base", metavar="FORMAT", help="Of weights not trained: fp32, bf16, int8 or int4."),
    click.option("--epochs", type=int, metavar="N", help="Passes over the data; 3 if left out."),
    click.option("--max-steps", type=int, metavar="N", help="Updates, in place of epochs."),
    click.option(
        "--evaluate-every", type=int, metavar="N", help="Updates between evaluations; an epoch if left out."
    ),
    click.option(
        "--early-stop",
        type=click.IntRange(min=1),
        metavar="N",
        help="End after N evaluations without a better one.",
    ),
    click.option("--batch-size", type=int, metavar="N", help="Rows of one update; 16, or all there are."),
    click.option("--learning-rate", type=float, metavar="X", help="2e-4 if left out."),
    click.option("--weight-decay", type=float, metavar="X", help="Of AdamW; none if left out."),
    click.option("--clip-norm", type=float, metavar="X", help="Of the whole gradient; no limit if left out."),
    click.option("--schedule", metavar="NAME", help="cosine (if left out), linear or constant."),
    click.option("--warmup", type=float, metavar="X", help="Updates, or below 1 a share; 0.03 if left out."),
    click.option("--ema", type=float, metavar="X", help="Keep a mean of the adapters, too, like 0.999."),
    click.option("--precision", metavar="FORMAT", help="Of what stages compute: fp32, bf16 or auto."),
    click.option("--seed", type=int, metavar="N", help="0 if left out."),
    click.option(
        "--sample",
        "sample_prompts",
        multiple=True,
        metavar="TEXT",
        help="Show how it goes on from this after every evaluation; may be given again.",
    ),
)
_RUNNING = (
    click.option("--local", "num_local", type=int, default=0, metavar="N", help="Start N peers on this PC."),
    click.option(
        "--nodes", type=int, default=0, metavar="N", help="Begin with N nodes; 0: when they will do."
    ),
    click.option("--listen", metavar="HOST:PORT", help=f"Where the hub is open to others; {_LISTEN}."),
    click.option("--public", multiple=True, metavar="HOST:PORT", help="Where others reach it from outside."),
    click.option("--out", metavar="DIR", help="For log and adapter; a new one under runs/ if left out."),
    click.option("--merge", is_flag=True, help="Also write the whole model, to the folder `merged` in it."),
    click.option("--resume", is_flag=True, help="Go on from the last checkpoint in --out."),
)
_ASKING = (
    click.option("--dry-run", is_flag=True, help="Say what it will take, and start nothing."),
    click.option("--swarm", metavar="FILE", help="Nodes file for --dry-run, as of `ravnest plan`."),
    click.option("--population", metavar="KIND:COUNT", help=f"Made-up nodes for it; {_USUAL_POPULATION}."),
    click.option(
        "--hub-upload", default="40 Mbit/s", show_default=True, metavar="RATE", help="What this PC can send."
    ),
)


def _with(options: tuple[Callable[..., Any], ...]) -> Callable[..., Any]:
    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@dataclass(frozen=True, slots=True)
class _Question:
    """What --dry-run is asked about."""

    swarm: str | None
    population: str | None
    hub_upload: str


@click.command("finetune")
@click.argument("model", metavar="MODEL")
@_with(_TRAINING)
@_with(_RUNNING)
@_with(_ASKING)
@plan_options
@dashboard_options(is_usual=True)
@click.option("--quiet", is_flag=True, help="Say only how to join, and what went wrong.")
@click.option("--json", "as_json", is_flag=True, help=f"Print JSON lines ({_SCHEMA}).")
def run_finetuning(
    model: str,
    dry_run: bool,
    merge: bool,
    wishes: PlanWishes,
    dashboard: bool | str,
    quiet: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Fine-tune a Hugging Face model with LoRA adapters, on PCs that cannot hold it.

    MODEL is a folder as save_pretrained writes it, or a hub id in the local cache; nothing is downloaded. The
    data has text, prompt and completion, or messages. With --local and no --listen all runs on this PC.
    Otherwise a hub is open, and others join with the line it prints. docs/finetuning.md has every option.

    \b
    ravnest finetune llama-7b --data chats.jsonl --base int4 --dry-run
    ravnest finetune llama-7b --data chats.jsonl --base int4 --nodes 4
    ravnest finetune tiny --data sums.jsonl --local 2
    """
    question = _Question(*(given.pop(name) for name in ("swarm", "population", "hub_upload")))
    running = {name: given.pop(name) for name in ("num_local", "nodes", "listen", "public", "out", "resume")}
    data, patience = given.pop("data"), given.pop("early_stop")
    settings = {name: value for name, value in given.items() if value is not None and value is not False}
    for name, read in (("columns", _read_columns), ("targets", _read_targets)):
        if name in settings:
            settings[name] = read(settings[name])
    if running["resume"] and running["out"] is None:
        raise ConfigError("--resume needs the --out that the training was started with")
    from ravnest.requester.callbacks import EarlyStopping
    from ravnest.requester.finetuning.finetune import make_finetuning

    callbacks = () if patience is None else (EarlyStopping(patience),)
    run = RunWishes(
        running["out"],
        None,
        running["resume"],
        wishes,
        quiet,
        as_json,
        _SCHEMA,
        dashboard,
        callbacks=callbacks,
    )
    work = make_finetuning(model, data, settings)
    if dry_run:
        _tell_cost(work, question, run)
    else:
        _train(work, running, run, merge=merge)


def _read_columns(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name.strip() and sign and own.strip() for name, sign, own in pairs):
        raise ConfigError(f"--columns {text!r} is no list of names; write prompt=question,completion=answer")
    return {name.strip(): own.strip() for name, _, own in pairs}


def _read_targets(text: str) -> str | list[str]:
    return text if text == "all-linear" else [part.strip() for part in text.split(",")]


def _train(work: "Finetuning", running: dict[str, Any], run: RunWishes, *, merge: bool) -> None:
    def make_job() -> Any:
        job = work.job
        if run.callbacks and job.val_data is None:
            raise ConfigError("--early-stop needs rows to validate with; give --val-data or --val-share")
        click.echo(f"fine-tuning {work.source.name}: {work.describe()}", err=True)
        return job

    num_local, listen, public = running["num_local"], running["listen"], running["public"]
    if num_local and listen is None and not public:
        result, file = train_here(make_job, num_local, run)
    else:
        place = HubPlace(listen or _LISTEN, public, running["nodes"], num_local)
        result, file = serve_hub(make_job, place, run)
    work.save_tokenizer(file.parent)
    report(result, file, run.schema, run.as_json)
    if merge:
        from ravnest.requester.finetuning.merging import merge_adapter

        place_out = merge_adapter(work.source.folder, file.parent, file.with_name(_MERGED))
        click.echo(f"the whole model is in {place_out}", err=True)


def _tell_cost(work: "Finetuning", question: _Question, run: RunWishes) -> None:
    """Plan as a hub would, and say who would do what, how fast, how long, and what is sent first."""
    from ravnest.requester.prepare import prepare

    if question.swarm is not None and question.population is not None:
        raise click.UsageError("Give either --swarm FILE or --population KIND:COUNT, one of the two.")
    population = question.population or (None if question.swarm else _USUAL_POPULATION)
    swarm = read_nodes(question.swarm, population, work.seed)
    config = run.plan.read(base_plan(question.hub_upload))
    job = work.job
    click.echo(f"fine-tuning {work.source.name}: {work.describe()}", err=True)
    click.echo(f"planning it on {question.swarm or population}", err=True)
    given = prepare(job, config, 0, 0.0).job
    answer = plan_job(given, swarm)
    found = _count_cost(work, answer)
    if run.as_json:
        click.echo(to_json({**plan_report(answer), "schema": _SCHEMA, "event": "plan", "finetune": found}))
        return
    print_plan(answer)
    click.echo("")
    for line in _show_cost(found, answer):
        click.echo(line)


def _count_cost(work: "Finetuning", answer: PlanAnswer) -> dict[str, float]:
    train, job, predicted = work.tables[0], work.job, answer.predicted
    rate = predicted.samples_per_second
    delivered = sum(answer.profile.parameter_bytes)
    return {
        "rows": job.num_total,
        "updates": job.num_updates,
        "tokens_per_second": rate * train.num_tokens / len(train),
        "seconds": job.num_total / rate if rate else 0.0,
        "first_delivery_bytes": delivered,
        "first_delivery_seconds": predicted.hub.first_weights_seconds if predicted.hub else 0.0,
        "adapter_bytes": sum(answer.profile.trained_bytes),
    }


def _show_cost(found: dict[str, float], answer: PlanAnswer) -> list[str]:
    memory = [
        f"{each.stage.node} {show_bytes(each.memory_bytes)} of {show_bytes(each.available_bytes)}"
        for cluster in answer.predicted.clusters
        for each in cluster.stages
    ]
    return [
        f"speed           {found['tokens_per_second']:,.0f} tokens/s, without padding",
        f"time            {show_seconds(found['seconds'])} for {show_count(int(found['updates']), 'update')}",
        f"first delivery  {show_bytes(found['first_delivery_bytes'])}, "
        f"{show_seconds(found['first_delivery_seconds'])} through the hub's line",
        f"memory          {', '.join(memory)}",
        f"result          {show_bytes(found['adapter_bytes'])} of adapters",
    ]
