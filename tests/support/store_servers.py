"""PostgreSQL and a bucket as real servers; PostgreSQL is killed with all it has started, and comes back."""

import glob
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

_READY = b"database system is ready to accept connections"
_USER = "nobody"  # PostgreSQL refuses to be root
BUCKET = "runs"


def find_postgres() -> Path | None:
    """Return the folder of PostgreSQL's programs; Debian does not put them on the PATH."""
    found = [*sorted(glob.glob("/usr/lib/postgresql/*/bin/postgres")), shutil.which("postgres") or ""]
    return Path(found[0]).parent if found[0] else None


class PostgresServer:
    """A cluster of its own in a temporary folder, heard at a socket there alone."""

    def __init__(self, folder: Path, options: tuple[str, ...] = ("-c", "fsync=off")) -> None:
        programs = find_postgres()
        assert programs is not None
        self._programs, self.folder, self._options = programs, folder, options
        self._process: subprocess.Popen[bytes] | None = None
        self.address = f"postgresql://ravnest@/postgres?host={folder}"
        words = [programs / "initdb", "-D", folder / "data", "-U", "ravnest", "-A", "trust", "-N"]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, **self._as_user())

    def start(self) -> None:
        """Start it; it takes connections when this returns."""
        words = [self._programs / "postgres", "-D", self.folder / "data", "-k", self.folder]
        settings = ["-c", "listen_addresses=", *self._options]
        self._process = subprocess.Popen(
            [*words, *settings], stderr=subprocess.PIPE, start_new_session=True, **self._as_user()
        )
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if _READY in line:
                break
        else:
            raise AssertionError("PostgreSQL did not start")
        self._rest = threading.Thread(target=self._process.stderr.read, daemon=True)
        self._rest.start()

    def kill(self) -> None:
        """Kill every process of it at once; all of them have ended when this returns."""
        kill_postgres(self.folder)
        self._reap()

    def _reap(self) -> None:
        assert self._process is not None
        self._process.wait()
        self._rest.join()  # its end of the pipe is closed when the last one has gone
        assert self._process.stderr is not None
        self._process.stderr.close()
        self._process = None

    @contextmanager
    def coming_back(self) -> Iterator[None]:
        """Start it again whenever somebody kills it."""
        is_over = False

        def bring_back() -> None:
            while True:
                self._reap()
                if is_over:
                    return
                self.start()

        watching = threading.Thread(target=bring_back)
        watching.start()
        try:
            yield
        finally:
            is_over = True
            kill_postgres(self.folder)
            watching.join()
            self.start()

    def close(self) -> None:
        """End it, if it runs."""
        if self._process is not None:
            self.kill()

    def _as_user(self) -> dict[str, Any]:
        if os.geteuid():
            return {"cwd": self.folder}
        found = pwd.getpwnam(_USER)
        return {"user": found.pw_uid, "group": found.pw_gid, "extra_groups": [], "cwd": self.folder}


def kill_postgres(folder: Path) -> None:
    """Kill every process of the server in this folder at once, as a power cut does."""
    pid = int((folder / "data" / "postmaster.pid").read_text().split()[0])
    children = psutil.Process(pid).children(recursive=True)
    for each in (pid, *(child.pid for child in children)):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


@contextmanager
def postgres(options: tuple[str, ...] = ("-c", "fsync=off")) -> Iterator[PostgresServer]:
    """Give a server that runs."""
    with tempfile.TemporaryDirectory(prefix="rvn-pg-") as place:
        if not os.geteuid():
            shutil.chown(place, _USER)
        server = PostgresServer(Path(place), options)
        try:
            server.start()
            yield server
        finally:
            server.close()


@contextmanager
def bucket_server() -> Iterator[dict[str, str]]:
    """Give the environment in which boto3 finds a server, which has one bucket."""
    words = [sys.executable, "-m", "tests.support.bucket_program"]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        yield {
            "AWS_ENDPOINT_URL": server.stdout.readline().strip(),
            "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
            "AWS_SECRET_ACCESS_KEY": "a-secret-of-the-test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        server.kill()
        server.communicate()
