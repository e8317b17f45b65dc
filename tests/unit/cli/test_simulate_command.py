"""`ravnest simulate` as a person meets it: what it prints, the same bytes twice, a sentence per mistake."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from click.testing import CliRunner

from ravnest.cli.main import program

SMALL = ("simulate", "--population", "lan:4", "--model", "gpt2", "--hours", "0.02", "--clusters", "1")


def run(*words):
    return CliRunner().invoke(program, [*words])


def test_it_prints_tables_json_and_curves(tmp_path):
    plot = tmp_path / "swarm.svg"
    found = run(*SMALL, "--json", "--plot", str(plot))
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout)
    assert report["schema"] == "ravnest.simulation/1"
    assert report["settings"]["nodes"] == 4
    assert ET.parse(plot).getroot().tag.endswith("svg")
    assert "the hub took" in found.stderr
    assert "the hub took" not in found.stdout


def test_another_process_with_other_hashes_prints_the_same_bytes():
    outputs = []
    for seed in ("1", "2"):
        words = [sys.executable, "-m", "ravnest", *SMALL, "--json"]
        env = {**os.environ, "PYTHONHASHSEED": seed}
        outputs.append(subprocess.run(words, capture_output=True, check=True, env=env).stdout)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("simulate",), 2, "Give either --nodes FILE or --population"),
        ((*SMALL, "--hours", "0"), 3, "--hours 0 cannot be simulated"),
        ((*SMALL, "--batch", "0"), 3, "--batch 0 is no number of samples"),
        ((*SMALL, "--updates", "0"), 3, "--updates 0 is no length of a job"),
        ((*SMALL, "--seed", "-1"), 3, "--seed -1 is negative"),
        ((*SMALL, "--link-noise", "nan"), 3, "--link-noise nan cannot be simulated"),
        ((*SMALL, "--churn", "-1"), 3, "--churn -1 is no number of times"),
        ((*SMALL, "--churn", "nothing.csv"), 3, "nothing.csv"),
    ],
)
def test_a_mistake_is_one_sentence(words, code, told):
    found = run(*words)
    assert found.exit_code == code, found.output
    assert told in found.stderr
    assert "Traceback" not in found.output
