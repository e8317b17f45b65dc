"""What a token of a text costs in stages, with caches of keys and values and with whole rows."""

import time
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.measure import in_fresh_process, say, table

Figures = dict[str, Any]

LAYERS, WIDTH, HEADS, NUM_WORDS = 6, 256, 4, 1024
LENGTHS = (128, 256)
PROMPT, REPEATS = 8, 5
CUTS = (1, 3)  # stages
MOST_TIMES_PLAIN = 1.5  # CPU of a token in one stage with caches, against transformers with its cache


def run(quick: bool) -> tuple[Figures, str, list[str]]:
    figures: Figures = {}
    for kind in ("gpt2", "llama"):
        for length in (32,) if quick else LENGTHS:
            found, _ = in_fresh_process(_measure, kind, length, quick)
            figures[f"{kind}, rows of {length}"] = found
            say(f"{kind}, rows of {length}: {found}")
    for name, found in figures.items():
        assert found["equal"], f"{name}: another text than that of transformers"
        assert not found["reason"], f"{name}: no caches: {found['reason']}"
    missed = [
        f"{name}: {found['times_plain']:.2f} times the CPU of transformers, {MOST_TIMES_PLAIN} asked"
        for name, found in figures.items()
        if not quick and found["times_plain"] > MOST_TIMES_PLAIN
    ]
    return figures, _report(figures), missed


def _make_model(kind: str, length: int, num_layers: int) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    words = {"vocab_size": NUM_WORDS, "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.2}
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_embd=WIDTH, n_layer=num_layers, n_head=HEADS, n_positions=length, **words
        )
        return transformers.GPT2LMHeadModel(config).eval()
    shape = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": num_layers}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS // 2}
    config = transformers.LlamaConfig(**shape, **heads, max_position_embeddings=length, **words)
    return transformers.LlamaForCausalLM(config).eval()


def _measure(kind: str, length: int, quick: bool) -> Figures:
    """Write a text that fills a row, in each way, in this process with one thread."""
    import torch

    from ravnest.model.capture.capture import capture

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model = _make_model(kind, length, 2 if quick else LAYERS)
    rows = torch.randint(NUM_WORDS, (4, length))
    captured = capture(model, {"input_ids": rows, "labels": rows.clone()}, self_test=False)
    prompt = torch.randint(NUM_WORDS, (PROMPT,)).tolist()
    lines = {count: _Line(captured, length, count) for count in CUTS}
    ways: dict[str, Callable[[], Iterator[int]]] = {
        "transformers": lambda: _write_alone(model, prompt, length)
    }
    for count, line in lines.items():
        ways[f"caches, stages: {count}"] = lambda line=line: line.write(prompt, True)
    ways["whole rows"] = lambda: lines[1].write(prompt, False)
    texts: dict[str, list[int]] = {}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for repeat in range(1 if quick else REPEATS):
        for name, way in ways.items():
            if repeat and name == "whole rows":
                continue  # takes minutes
            texts[name], facts = _time(way)
            found[name].append(facts)
    figures: Figures = {name: _middle(facts) for name, facts in found.items()}
    plain = [
        one["cpu_ms"] / other["cpu_ms"]
        for one, other in zip(found["caches, stages: 1"], found["transformers"], strict=True)
    ]
    figures["times_plain"] = round(median(plain), 2)
    figures["reason"] = "; ".join(line.reason for line in lines.values() if line.reason)
    figures["equal"] = len({tuple(text) for text in texts.values()}) == 1
    return figures


def _time(way: Callable[[], Iterator[int]]) -> tuple[list[int], dict[str, float]]:
    """Return the tokens, and what they took: CPU for each after the first, and time by the clock."""
    tokens, marks = [], [(time.perf_counter(), time.process_time())]
    for token in way():
        tokens.append(token)
        marks.append((time.perf_counter(), time.process_time()))
    (start, _), (first, first_cpu), (last, last_cpu) = marks[0], marks[1], marks[-1]
    count = max(len(tokens) - 1, 1)
    return tokens, {
        "first_ms": 1e3 * (first - start),
        "cpu_ms": 1e3 * (last_cpu - first_cpu) / count,
        "tokens_per_second": count / max(last - first, 1e-9),
    }


def _middle(facts: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(median(each[name] for each in facts), 2) for name in facts[0]}


def _write_alone(model: Any, prompt: list[int], length: int) -> Iterator[int]:
    """Write greedily with transformers and its cache; tokens come as they are made."""
    import torch

    given, past = torch.tensor([prompt]), None
    with torch.no_grad():
        for _ in range(length - len(prompt) + 1):
            out = model(given, past_key_values=past, use_cache=True)
            past, token = out.past_key_values, int(out.logits[0, -1].argmax())
            yield token
            given = torch.tensor([[token]])


class _Line:
    """The stages of a model in this process, without a network."""

    def __init__(self, captured: Any, length: int, num_stages: int) -> None:
        from ravnest.model.blueprint.slicing import slice_blueprint
        from ravnest.model.stage.stage_program import build_stage_program
        from ravnest.model.stage.stage_texts import StageTexts

        blueprint, self._length = captured.blueprint, length
        stop = blueprint.num_positions
        cuts = [stop * number // num_stages for number in range(num_stages + 1)]
        self._stages = [slice_blueprint(blueprint, *each) for each in pairwise(cuts)]
        self._texts = [StageTexts(build_stage_program(stage), length) for stage in self._stages]
        self._state = {name: tensor.detach() for name, tensor in captured.state.items()}

    @property
    def reason(self) -> str:
        """Why a stage has no caches."""
        return "; ".join(each.reason for each in self._texts if each.reason)

    def write(self, prompt: list[int], has_caches: bool) -> Iterator[int]:
        """Write greedily until the row is full."""
        import torch

        from ravnest.model.stage.stage_texts import TextCache

        caches = [TextCache() if has_caches else None for _ in self._texts]
        held: list[dict[Any, Any]] = [{} for _ in self._texts]
        tokens = torch.zeros(1, self._length, dtype=torch.int64)
        tokens[0, : len(prompt)] = torch.tensor(prompt)
        first, end = 0, len(prompt)
        with torch.no_grad():
            while end < self._length:
                token = int(self._pass(tokens, first, end, caches, held)[0, -1].argmax())
                yield token
                tokens[0, end] = token
                first, end = end, end + 1
            yield int(self._pass(tokens, first, end, caches, held)[0, -1].argmax())

    def _pass(self, tokens: Any, first: int, end: int, caches: Any, held: Any) -> Any:
        import torch

        from ravnest.model.blueprint.place_axes import find_axis
        from ravnest.model.stage.stage_texts import NewPlaces

        places = NewPlaces(1, first, end)
        for number, (stage, texts) in enumerate(zip(self._stages, self._texts, strict=True)):
            passed = texts.run(self._state, held[number], {"input_ids": tokens}, places, caches[number])
            for value, part in passed.outputs.items():
                kind = stage.evaluate.values[value]
                axis = find_axis(kind, self._length)
                if axis is None:
                    held[number + 1][value] = part
                else:
                    rows = held[number + 1].setdefault(value, torch.zeros(kind.shape_at(1), dtype=part.dtype))
                    places.take(rows, axis).copy_(part)
        return passed.results["logits"]


def _report(figures: Figures) -> str:
    head = ["model", "way", "CPU ms a token", "first token ms", "tokens/s"]
    rows = [
        [name, way, each["cpu_ms"], each["first_ms"], each["tokens_per_second"]]
        for name, found in figures.items()
        for way, each in found.items()
        if isinstance(each, dict)
    ]
    return (
        f"Models of {LAYERS} layers, width {WIDTH}, {NUM_WORDS} words, random weights, fp32, one thread, all "
        f"stages in one process without a network. A prompt of {PROMPT} tokens is gone on with until the row "
        f"is full. CPU is that of each token after the first; medians of {REPEATS} texts, one text for whole "
        f"rows. transformers runs its own model with its own cache.\n\n" + table(head, rows)
    )
