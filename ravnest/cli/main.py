"""The command `ravnest`: reads files and flags, asks the pure parts, prints the answer.

Data goes to stdout, narration to stderr. An error is one sentence and an exit code of its own. Everything
heavy is imported inside the command that needs it, so that `--help` is quick.
"""

import errno
import io
import sys
from importlib import metadata

import click
from click.shell_completion import CompletionItem

from ravnest.cli.demo import demo
from ravnest.cli.doctor import doctor, env
from ravnest.cli.finetune import run_finetuning
from ravnest.cli.generate import write_text_after
from ravnest.cli.inspect import inspect
from ravnest.cli.join import finish, join, pause, resume
from ravnest.cli.plan import plan
from ravnest.cli.runs import checkpoint, dashboard, guests, invite, kick, logs, revoke, status, stop, token
from ravnest.cli.simulate import simulate
from ravnest.cli.train import hub, train
from ravnest.errors import RavnestError

_INTERRUPTED = 130


def main() -> None:
    """Run the command line; the entry point of the installed program."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="backslashreplace"
            )  # a name this terminal cannot show is no reason to stop
    program(prog_name="ravnest")


class _Program(click.Group):
    """A group whose commands end with the exit code of the error they raise."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except RavnestError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(error.exit_code)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # click ends quietly when the reader has gone
            click.echo(f"error: {error.strerror or error}; make room or choose another place", err=True)
            ctx.exit(RavnestError.exit_code)
        except KeyboardInterrupt:
            click.echo("stopped", err=True)
            ctx.exit(_INTERRUPTED)


def _show_version(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        from ravnest.protocol.membership import PROTOCOL_VERSION
        from ravnest.protocol.messages import WIRE_VERSION

        try:
            known = f"ravnest {metadata.version('ravnest')}"
        except metadata.PackageNotFoundError:
            known = "ravnest, run from its source folder without being installed"
        click.echo(f"{known} (protocol {PROTOCOL_VERSION}, wire {WIRE_VERSION})")
        ctx.exit()


@click.group(cls=_Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the versions of the program and of what it speaks.",
)
def program() -> None:
    """Train one model together on ordinary, unequal PCs over the internet.

    \b
    Exit codes: 0 fine, 1 failed, 2 wrong usage, 3 a file or value is not
    usable, 4 the hub cannot be reached, 5 it refuses, 6 the nodes cannot
    hold the model, 7 stopped by a guard, 9 another hub has taken the run
    over, 130 stopped by Ctrl-C.
    """


_COMMANDS = (
    demo,
    plan,
    simulate,
    inspect,
    train,
    run_finetuning,
    write_text_after,
    hub,
    join,
    pause,
    resume,
    finish,
    status,
    logs,
    dashboard,
    checkpoint,
    stop,
    token,
    invite,
    guests,
    revoke,
    kick,
    doctor,
    env,
)
_FILES = ("FILE", "DIR", "FOLDER", "OTHER", "MODEL")  # in the name that help gives a value


class _FileName(click.types.StringParamType):
    """A word for which the shell offers files and folders."""

    def shell_complete(self, _ctx: click.Context, _param: click.Parameter, word: str) -> list[CompletionItem]:
        return [CompletionItem(word, type="file")]


for _command in _COMMANDS:
    program.add_command(_command)
    for _each in _command.params:
        _shown = _each.metavar or (_each.name or "").upper()
        if _each.type is click.STRING and any(word in _shown for word in _FILES):
            _each.type = _FileName()
