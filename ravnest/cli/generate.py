"""`ravnest generate`: what a model writes after a prompt, on this PC or in a swarm, token by token."""

import json
import time
from collections.abc import Iterator
from typing import Any

import click

from ravnest.units import show_count, show_seconds

_SCHEMA = "ravnest.generate/1"


@click.command("generate")
@click.argument("model", metavar="[MODEL]", required=False)
@click.option("--prompt", metavar="TEXT", required=True, help="What it goes on from.")
@click.option("--hub", "folder", metavar="DIR", help="Ask the clusters of the hub that runs in this folder.")
@click.option("--adapter", metavar="DIR", help="An adapter for it, as `ravnest finetune` writes it.")
@click.option("--weights", metavar="FILE", help="Weights in place of its own: a result of a training.")
@click.option("--chat", "is_chat", is_flag=True, help="The prompt is what a user says in a chat.")
@click.option("--max-tokens", type=int, default=200, show_default=True, metavar="N", help="At most.")
@click.option("--temperature", type=float, default=0.0, show_default=True, metavar="X", help="0: likeliest.")
@click.option("--top-p", type=float, default=1.0, show_default=True, metavar="X", help="Share of the chance.")
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Of what is drawn.")
@click.option("--json", "as_json", is_flag=True, help=f"Print one JSON object ({_SCHEMA}) at the end.")
def write_text_after(
    model: str | None,
    prompt: str,
    folder: str | None,
    adapter: str | None,
    weights: str | None,
    is_chat: bool,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Write text after a prompt, with a model in the memory of this PC or with the swarm of a hub.

    MODEL is a Hugging Face folder, a hub id in the local cache, or an adapter's folder. With --hub the model
    is the one that the hub trains: its clusters write the text, and train on. Text goes to stdout.

    \b
    ravnest generate runs/sums --prompt 'What is 3 and 4? '
    ravnest generate my-llama --prompt 'Once upon a time' --temperature 0.8 --top-p 0.95
    ravnest generate --hub runs/llama --prompt 'Once upon a time'
    """
    if (model is None) == (folder is None) or (folder is not None and (adapter or weights)):
        raise click.UsageError("give a MODEL (with --adapter or --weights), or --hub DIR alone")
    if folder is not None:
        pieces = _ask_hub(folder, prompt=prompt, is_chat=is_chat, **sampling)
    else:
        assert model is not None
        pieces = _write_here(model, adapter, weights, prompt, is_chat, sampling)
    times, texts = [_now()], []
    for piece, num_tokens in pieces:
        times += [_now()] * num_tokens
        texts.append(piece)
        if not as_json:
            click.echo(piece, nl=False)
    if not as_json:
        click.echo("")
    count, first = len(times) - 1, times[min(1, len(times) - 1)] - times[0]
    rate = (count - 1) / (times[-1] - times[1]) if count > 1 and times[-1] > times[1] else 0.0
    told = f"the first after {show_seconds(first)}" + (f", then {rate:.3g} tokens/s" if rate else "")
    click.echo(f"{show_count(count, 'token')}: {told}", err=True)
    if as_json:
        facts = {"first_seconds": first, "tokens_per_second": rate, "tokens": count}
        click.echo(json.dumps({"schema": _SCHEMA, "text": "".join(texts), **facts}, sort_keys=True))


def _write_here(
    model: str, adapter: str | None, weights: str | None, prompt: str, is_chat: bool, sampling: dict[str, Any]
) -> Iterator[tuple[str, int]]:
    """Load a model; then return pieces of text, each with the tokens that it took."""
    from ravnest.requester.generation import Sampling, load_writer

    chosen = Sampling(**sampling)
    started = _now()
    writer = load_writer(model, adapter, weights)
    click.echo(f"loaded in {show_seconds(_now() - started)}", err=True)
    return _count(writer, prompt, chosen, is_chat)


def _count(writer: Any, prompt: str, sampling: Any, is_chat: bool) -> Iterator[tuple[str, int]]:
    tokens: list[int] = []
    num_before = 0
    for piece in writer.write(prompt, sampling, is_chat=is_chat, hear=tokens.append):
        yield piece, len(tokens) - num_before
        num_before = len(tokens)
    yield "", len(tokens) - num_before


def _ask_hub(folder: str, **wishes: Any) -> Iterator[tuple[str, int]]:
    from pathlib import Path

    from ravnest.requester.hub_channel import TextRequest, ask_hub

    for piece in ask_hub(Path(folder), TextRequest(**wishes)):
        yield piece.text, int(piece.is_token)


def _now() -> float:
    return time.perf_counter()  # noqa: TID251 - people want to know how fast it is
