"""Text from real peers while they train: by the command, from a thread, and from the result after it."""

import json
import threading
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import ravnest as rv
from ravnest.cli.main import program
from ravnest.errors import ConfigError, RavnestError
from ravnest.requester.text_channel import TextRequest, request_text
from tests.support.tiny_llama import write_tiny_llama

transformers = pytest.importorskip("transformers")
PROMPT, COUNT = "3 and 4? ", 12


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
                list(request_text(run, prompt=PROMPT, max_tokens=0))
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

    with rv.local(nodes=2, folder=run) as hub:
        with pytest.raises(ConfigError, match="there is no model to write with"):
            hub.generate(PROMPT)
        hub.fit(job, callbacks=[watch])
        after = "".join(hub.generate(PROMPT, max_tokens=COUNT))
    assert not faults
    assert found["command"]["text"] == found["thread"] == after == wanted
    assert found["command"]["tokens"] == COUNT
    assert found["command"]["first_seconds"] > 0
    assert found["sampled"].startswith(wanted)
    with pytest.raises(RavnestError, match="no hub is at work in"):
        list(request_text(run, prompt=PROMPT))
    assert "proof" in TextRequest.__struct_fields__
