"""`ravnest logs`: print what the hub of a folder said, with times, and follow it."""

import json
import re
import threading

import click

from ravnest.cli.common import find_parts
from ravnest.errors import ConfigError
from ravnest.units import show_plainly


@click.command()
@click.argument("folder", required=False)
@click.option("--follow", "-f", is_flag=True, help="Print on while the hub is at work; Ctrl-C ends it.")
@click.option(
    "--lines", "-n", type=int, metavar="N", help="Only the last N lines; all that is kept if left out."
)
@click.option("--find", "words", metavar="WORDS", help="Only lines with these words.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each line (ravnest.logs/1).")
def logs(folder: str | None, follow: bool, lines: int | None, words: str | None, as_json: bool) -> None:
    """Print the log of the run in FOLDER; the newest under runs/ if left out.

    It has every notice and what the program itself says; more of that with `ravnest hub --verbose`. The files
    are hub.log and those before it, 12 MB at most. The lines of a peer are on its own terminal.
    """
    from ravnest.requester.run_folder import find_run, read_hub_file
    from ravnest.requester.run_log import LogReader

    if lines is not None and lines < 0:
        raise ConfigError(f"--lines {lines} is less than none; give 0 or more")
    place = find_run(folder)
    reader = LogReader(place)
    is_running = read_hub_file(place).process is not None

    def show(found: list[str]) -> None:
        for line in found:
            if words is None or words.lower() in line.lower():
                click.echo(_to_json(line) if as_json else show_plainly(line))

    known = [line for line in reader.read_all() if words is None or words.lower() in line.lower()]
    show(known if lines is None else known[max(0, len(known) - lines) :])
    pause = threading.Event()  # never set
    while follow and is_running:
        pause.wait(find_parts().timeouts.program.log_look_seconds)
        is_running = read_hub_file(place).process is not None  # before the last look, not after
        show(reader.read_new())


_LINE = re.compile(r"(?P<at>\S+ \S+) (?P<level>[A-Z]+) +(?P<source>\S+): (?P<text>.*)")


def _to_json(line: str) -> str:
    found = _LINE.fullmatch(line)
    parts = {"text": line} if found is None else found.groupdict()
    return json.dumps({"schema": "ravnest.logs/1", **parts}, sort_keys=True)
