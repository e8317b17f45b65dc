"""Text from real peers while they train: by the command, from a thread, and from the result after it."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import CliRunner

import ravnest as rv
from ravnest.cli.main import program
from ravnest.errors import ConfigError, RavnestError
from ravnest.requester.hub_channel import (
    AnswerPiece,
    ChannelServer,
    HubRequest,
    ProvenRequest,
    TextRequest,
    ask_hub,
    prove_requester,
)
from ravnest.requester.session import LOCAL_PLAN
from tests.support.tiny_llama import write_tiny_llama

transformers = pytest.importorskip("transformers")
PROMPT, COUNT = "3 and 4? ", 12
SECRET = b"s" * 16


@pytest.mark.timeout(240)
def test_a_hub_writes_for_commands_and_threads_what_the_whole_model_writes(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "tiny")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    wanted = "".join(rv.generate(folder, PROMPT, max_tokens=COUNT))
    rows = torch.randint(len(tokenizer), (64, 32), generator=torch.Generator().manual_seed(1))
    job = rv.Job(
        model,
        {"input_ids": rows, "labels": rows.clone()},
        val_data={"input_ids": rows[:8], "labels": rows[:8].clone()},
        batch_size=8,
        epochs=100_000,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-30),
        precision="fp32",
        tokenizer=tokenizer,
        sample_prompts=[PROMPT],
    )
    run, found, faults = tmp_path / "run", {}, []

    def read() -> None:
        try:
            asked = ["generate", "--hub", str(run), "--prompt", PROMPT, "--max-tokens", str(COUNT), "--json"]
            found["command"] = json.loads(CliRunner().invoke(program, asked).stdout)
            found["thread"] = "".join(hub.generate(PROMPT, max_tokens=COUNT))
            with pytest.raises(ConfigError, match="max_tokens is 0"):
                list(ask_hub(run, TextRequest(PROMPT, max_tokens=0)))
            found["port"] = True
        except BaseException as error:  # the test says it
            faults.append(error)
        finally:
            hub.stop()

    def watch(news: rv.notices.Notice) -> None:
        if isinstance(news, rv.notices.ClusterStarted):
            with pytest.raises(ConfigError, match=r"read hub\.generate"):
                next(hub.generate(PROMPT))
            threading.Thread(target=read).start()
        elif isinstance(news, rv.notices.SampledText):
            found["sampled"] = news.text

    with rv.local(nodes=2, folder=run, plan=replace(LOCAL_PLAN, clusters=1)) as hub:
        with pytest.raises(ConfigError, match="there is no model to write with"):
            hub.generate(PROMPT)
        hub.fit(job, callbacks=[watch])
        after = "".join(hub.generate(PROMPT, max_tokens=COUNT))
    assert not faults
    assert found["command"]["text"] == found["thread"] == after == wanted
    assert 1 < found["command"]["tokens"] <= COUNT, "it may come to an end before"
    assert found["command"]["first_seconds"] > 0
    assert found["sampled"].startswith(wanted)
    with pytest.raises(RavnestError, match="no hub is at work in"):
        list(ask_hub(run, TextRequest(PROMPT)))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"junk\n", "that is no request to a hub"),
        (
            msgspec.json.encode(ProvenRequest("0" * 64, TextRequest("hi"))) + b"\n",
            "does not prove the hub's key",
        ),
        (msgspec.json.encode(ProvenRequest(prove_requester(SECRET), TextRequest("hi"))) + b"\n", ""),
    ],
)
def test_only_who_knows_the_key_gets_an_answer(line: bytes, told: str) -> None:
    async def answer(asked: HubRequest) -> AsyncGenerator[tuple[int, str], None]:
        assert isinstance(asked, TextRequest)
        yield 7, asked.prompt

    async def ask() -> list[AnswerPiece]:
        async with ChannelServer(SECRET, answer).listening() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(line)
            lines = (await reader.read()).splitlines()
            writer.close()
        return [msgspec.json.decode(each, type=AnswerPiece) for each in lines]

    *pieces, end = asyncio.run(ask())
    assert end.is_end
    assert told in end.fault
    assert pieces == ([] if told else [AnswerPiece("hi", is_token=True)])
