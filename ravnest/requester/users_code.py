"""Explains what the requester's own code raises: one sentence, with their lines and none of ours."""

import contextlib
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

from ravnest.errors import CaptureError, ConfigError

_NOT_THE_USERS = (str(Path(__file__).parents[1]), sysconfig.get_paths()["stdlib"], "<")


@contextlib.contextmanager
def users_code(file: str) -> Iterator[None]:
    """Turn what the requester's code raises into a ConfigError with their lines, and none of ours."""
    try:
        yield
    except CaptureError:
        raise
    except (Exception, SystemExit) as error:  # whatever the code of someone else may raise
        raise _tell(error, file) from None


def _tell(error: BaseException, file: str) -> ConfigError:
    if isinstance(error, SyntaxError):
        place = f"{_shorten(error.filename)}:{error.lineno}" if error.filename else file
        line = f": {error.text.strip()}" if error.text else ""
        return ConfigError(f"{place} is not Python: {error.msg}{line}")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_NOT_THE_USERS) and "site-packages" not in frame.filename
    ]
    place = f"{_shorten(frames[-1].filename)}:{frames[-1].lineno}" if frames else file
    if isinstance(error, ConfigError):  # without their lines it is of ours, and says what it is about
        return ConfigError(f"{place}: {error}") if frames else error
    shown = "".join(f"\n  {_shorten(f.filename)}:{f.lineno} in {f.name}: {f.line}" for f in frames)
    if isinstance(error, SystemExit):
        fix = 'keep what runs a program under `if __name__ == "__main__":`'
        return ConfigError(f"{place} ended the program ({error.code}); {fix}{shown}")
    fix = "; install it where ravnest is installed" if isinstance(error, ModuleNotFoundError) else ""
    return ConfigError(f"{place} failed: {type(error).__name__}: {error}{fix}{shown}")


def _shorten(file: str) -> str:
    """Return a path as the requester would write it here."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
