"""`ravnest generate`: what a model writes after a prompt, on this PC, token by token."""

import json
import time
from typing import Any

import click

from ravnest.units import show_count, show_seconds

_SCHEMA = "ravnest.generate/1"


@click.command("generate")
@click.argument("model", metavar="MODEL")
@click.option("--prompt", metavar="TEXT", required=True, help="What it goes on from.")
@click.option("--adapter", metavar="DIR", help="An adapter for it, as `ravnest finetune` writes it.")
@click.option("--weights", metavar="FILE", help="Weights in place of its own: a result of a training.")
@click.option("--chat", "is_chat", is_flag=True, help="The prompt is what a user says in a chat.")
@click.option("--max-tokens", type=int, default=200, show_default=True, metavar="N", help="At most.")
@click.option("--temperature", type=float, default=0.0, show_default=True, metavar="X", help="0: likeliest.")
@click.option("--top-p", type=float, default=1.0, show_default=True, metavar="X", help="Share of the chance.")
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Of what is drawn.")
@click.option("--json", "as_json", is_flag=True, help=f"Print one JSON object ({_SCHEMA}) at the end.")
def write_text_after(
    model: str,
    prompt: str,
    adapter: str | None,
    weights: str | None,
    is_chat: bool,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Write text after a prompt. The model must fit in the memory of this PC.

    MODEL is a Hugging Face folder, a hub id in the local cache, or an adapter's folder. Text goes to stdout.

    \b
    ravnest generate runs/sums --prompt 'What is 3 and 4? '
    ravnest generate my-llama --prompt 'Once upon a time' --temperature 0.8 --top-p 0.95
    """
    from ravnest.requester.generation import Sampling, load_writer

    chosen = Sampling(**sampling)
    started = _now()
    writer = load_writer(model, adapter, weights)
    click.echo(f"loaded in {show_seconds(_now() - started)}", err=True)
    times, pieces = [_now()], []
    for piece in writer.write(prompt, chosen, is_chat=is_chat, hear=lambda _: times.append(_now())):
        pieces.append(piece)
        if not as_json:
            click.echo(piece, nl=False)
    if not as_json:
        click.echo("")
    count, first = len(times) - 1, times[min(1, len(times) - 1)] - times[0]
    rate = (count - 1) / (times[-1] - times[1]) if count > 1 else 0.0
    told = f"the first after {show_seconds(first)}" + (f", then {rate:.3g} tokens/s" if rate else "")
    click.echo(f"{show_count(count, 'token')}: {told}", err=True)
    if as_json:
        facts = {"first_seconds": first, "tokens_per_second": rate, "tokens": count}
        click.echo(json.dumps({"schema": _SCHEMA, "text": "".join(pieces), **facts}, sort_keys=True))


def _now() -> float:
    return time.perf_counter()  # noqa: TID251 - people want to know how fast it is
