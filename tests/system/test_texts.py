"""Text through the stages of running clusters, on virtual time: what the whole model writes, whoever dies."""

import asyncio
from dataclasses import replace
from functools import cache

import pytest
import torch

import ravnest as rv
from ravnest.errors import RavnestError
from ravnest.hub.coordinator.notices import ClusterStarted, Evaluated, SampledText
from ravnest.peer.compute_protocol import Delivered
from ravnest.protocol.generation import GenerationAnswer, GenerationEnd, GenerationStep, GenerationValues
from ravnest.requester.generation import Sampling
from tests.support.system_world import PLAN, Pc, World

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.timeout(120),  # capture of a Hugging Face model, for each of the two
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
LENGTH, NUM_WORDS, PROMPT, COUNT = 24, 64, [5, 9, 60], 14


@cache
def make_language_job(kind: str, **options) -> rv.Job:
    """Return a job whose weights stay as they are, so that a text can be compared while it is trained."""
    torch.manual_seed(4)
    size = {"vocab_size": NUM_WORDS, "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.3}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=32, n_layer=4, n_head=2, n_positions=LENGTH, **size)
        model = transformers.GPT2LMHeadModel(config)
    else:
        shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**shape, **heads, max_position_embeddings=64, **size)
        )
    rows = torch.randint(NUM_WORDS, (256, LENGTH), generator=torch.Generator().manual_seed(1))
    return rv.Job(
        model.eval(),
        {"input_ids": rows, "labels": rows.clone()},
        val_data={"input_ids": rows[:16], "labels": rows[:16].clone()},
        batch_size=8,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-30),
        precision="fp32",
        tokenizer=(lambda text: [ord(each) % NUM_WORDS for each in text], lambda ids: "".join(map(chr, ids))),
        **{"epochs": 4, **options},
    )


def write_alone(job: rv.Job, prompt: list[int], count: int) -> list[int]:
    """Return what the whole model writes greedily, by transformers' own loop."""
    model = job.model.eval()
    with torch.no_grad():
        out = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


class Reading:
    """Asks for a text as soon as a cluster trains, and keeps its tokens, or why there is none."""

    def __init__(self, sampling: Sampling, at_token=lambda world, count: None) -> None:
        self.sampling, self.at_token = sampling, at_token
        self.tokens: list[int] = []
        self.fault: str | None = None
        self.asked: list[str] = []  # the nodes that got steps
        self._task: asyncio.Task[None] | None = None

    def hear(self, world: World, news: object) -> None:
        if isinstance(news, ClusterStarted) and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._read(world))

    async def _read(self, world: World) -> None:
        try:
            async for token, _ in world.texts.stream(PROMPT, self.sampling):
                if token >= 0:
                    self.tokens.append(token)
                    self.at_token(world, len(self.tokens))
        except RavnestError as error:
            self.fault = str(error)

    def watch(self, world: World, name: str, item: object) -> None:
        if isinstance(item, Delivered) and isinstance(item.message, GenerationStep):
            self.asked.append(name)


def make_world(kind: str, reading: Reading, **options) -> World:
    return World(
        make_language_job(kind),
        [Pc(1.9e6, 20.0)] * 5,
        plan=replace(PLAN, clusters=2),
        hear=reading.hear,
        watch=reading.watch,
        **options,
    )


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_cluster_that_trains_writes_what_the_whole_model_writes(kind, caplog):
    caplog.set_level("INFO", "ravnest.peer.stage_generation")
    crossed: dict[int, set[int]] = {}

    def see(world, sender, to, message):
        if isinstance(message, GenerationValues):
            # (rows, places, ...), or (rows, heads, places, ...) where a cut runs through an attention
            shapes = [spec.shape for _, spec in message.values]
            crossed.setdefault(message.step, set()).update(x[1 if len(x) == 3 else 2] for x in shapes)
        return (0.0,)

    reading = Reading(Sampling(max_tokens=COUNT))
    world = make_world(kind, reading, leaving=see)
    ended = world.run()
    clusters = ended.plan.clusters
    assert sorted(len(cluster.stages) for cluster in clusters)[0] >= 2
    assert reading.fault is None
    assert reading.tokens == write_alone(world.job, PROMPT, COUNT)
    assert len(set(reading.tokens)) > 3, "a text of one word shows nothing"
    told = [each.getMessage() for each in caplog.records if "caches" in each.getMessage()]
    assert len(told) == len(set(reading.asked)), "each stage that wrote has tried its caches"
    assert all("with caches" in each for each in told)
    # The prompt crosses once, then one place for each token.
    assert crossed == {0: {len(PROMPT)}, **{step: {1} for step in range(1, COUNT)}}
    assert set(ended.counts.values()) == {world.job.epochs}, "the books know nothing of texts"


def test_a_text_longer_than_the_rows_is_seen_by_its_last_tokens():
    reading = Reading(Sampling(max_tokens=LENGTH + 3))
    world = make_world("llama", reading)
    world.run()
    tokens = [*PROMPT]
    with torch.no_grad():
        for _ in range(LENGTH + 3):
            logits = world.job.model(torch.tensor([tokens[-LENGTH:]])).logits
            tokens.append(int(logits[0, -1].argmax()))
    assert reading.tokens == tokens[len(PROMPT) :]


def test_a_death_in_the_middle_changes_no_token():
    killed = []

    def kill(world: World, count: int) -> None:
        if count == 5:
            killed.append(reading.asked[-1])
            world.kill(killed[0])

    reading = Reading(Sampling(max_tokens=COUNT), kill)
    world = make_world("llama", reading)
    ended = world.run()
    assert reading.fault is None
    assert reading.tokens == write_alone(world.job, PROMPT, COUNT)
    late = reading.asked[reading.asked.index(killed[0]) :]
    assert set(late) - {killed[0]}, "others went on with it"
    assert set(ended.counts.values()) == {world.job.epochs}


def test_a_leaf_that_says_nothing_is_not_waited_for():
    silent = []

    def hold_back(world, sender, to, message):
        if isinstance(message, GenerationAnswer):
            silent.append(sender) if not silent else None
            return () if sender == silent[0] else (0.0,)
        return (0.0,)

    reading = Reading(Sampling(max_tokens=3))
    slow = [Pc(1.9e6, 1.0)] * 5  # so the job lasts longer than the hub waits
    world = replace(make_world("llama", reading, leaving=hold_back), pcs=slow)
    world.run()
    assert reading.fault is None
    assert reading.tokens == write_alone(world.job, PROMPT, 3)


def test_without_any_cluster_a_text_ends_with_a_sentence():
    def kill_all(world: World, count: int) -> None:
        if count == 2:
            for name in world.alive:
                world.kill(name)

    reading = Reading(Sampling(max_tokens=COUNT), kill_all)
    make_world("llama", reading, limit_seconds=200.0).run()
    assert len(reading.tokens) == 2
    assert reading.fault is not None
    assert reading.fault.startswith("no cluster can go on with the text: cluster ")


def test_texts_are_sampled_after_every_evaluation_and_the_last_one_is_waited_for():
    prompts = ["abc", "x"]
    job = make_language_job("llama", sample_prompts=tuple(prompts), epochs=2)
    forgotten, samplers = set(), []

    def watch(world, name, item):
        if isinstance(item, Delivered) and isinstance(item.message, GenerationEnd):
            forgotten.add(name)

    def sample(world, news):
        if isinstance(news, Evaluated):
            samplers.append(world.texts)
            samplers[-1].sample(news)

    world = World(job, [Pc(1.9e6, 20.0)] * 5, plan=replace(PLAN, clusters=2), hear=sample, watch=watch)
    ended = world.run()
    found = ended.of(SampledText)
    assert [(each.epoch, each.prompt) for each in found] == [(e, p) for e in (1, 2) for p in prompts]
    encode, decode = job.tokenizer
    for each in found:
        num_sure = LENGTH - len(each.prompt) + 1  # later tokens have seen less than the whole text
        assert each.text[:num_sure] == decode(write_alone(job, encode(each.prompt), num_sure))
    assert forgotten, "stages forget a text that is done"
    assert ended.result is not None
