"""Where PostgreSQL is, as people write it; shown without its password, whatever is shown.

What is left out comes from libpq's usual places: PGPASSWORD, ~/.pgpass, PGSSLMODE and so on.
"""

import re
from typing import Any
from urllib.parse import unquote, urlsplit

from ravnest.config import StoreTimeouts
from ravnest.errors import ConfigError

SCHEMES = ("postgresql", "postgres")
_HOSTS = re.compile(r"[^@/?#]*")
_SECRETS = ("password", "sslpassword", "scram_client_key", "scram_server_key", "oauth_client_secret")
_FIX = (
    "write postgresql://USER@HOST:PORT/DATABASE, with signs like @ / # in a password as %40 %2F %23, or put "
    "the password into ~/.pgpass or PGPASSWORD"
)
_MOST_SHOWN = 300
_MOST_LETTERS = 2_000  # more do not fit in hub.json


class PostgresAddress:
    """A checked address; `str` of it has no password, and neither has what `redact` returns."""

    def __init__(self, text: str) -> None:
        try:
            parts = urlsplit(text)
        except ValueError:
            raise ConfigError(f"--store is no address of PostgreSQL; {_FIX}") from None
        user, at, hosts = parts.netloc.rpartition("@")
        pairs = [piece.partition("=") for piece in parts.query.split("&") if piece]
        is_plain = text.startswith(tuple(f"{scheme}://" for scheme in SCHEMES)) and text.isprintable()
        is_plain &= "@" not in user + parts.path + parts.query and not parts.fragment
        is_plain &= all(equals for _, equals, _ in pairs) and len(text) <= _MOST_LETTERS
        ports = [host.rpartition(":")[2] for host in hosts.split(",") if re.search(r":[^\]]*$", host)]
        if not is_plain or not _HOSTS.fullmatch(hosts) or not all(port.isdecimal() for port in ports):
            raise ConfigError(f"--store is no address of PostgreSQL; {_FIX}")
        name, _, password = user.partition(":")
        self._text = text
        given = [password, *(value for key, _, value in pairs if unquote(key) in _SECRETS)]
        self._secrets = sorted(
            {x for each in given for x in (each, unquote(each)) if x}, key=len, reverse=True
        )
        # All but the passwords stays as it was written: libpq reads it again when it is remembered.
        query = "&".join("".join(pair) for pair in pairs if unquote(pair[0]) not in _SECRETS)
        self._shown = f"{parts.scheme}://{name}{at}{hosts}{parts.path}{f'?{query}' if query else ''}"

    def __str__(self) -> str:
        return self._shown

    def __repr__(self) -> str:
        return f"PostgresAddress({self._shown!r})"

    def redact(self, text: str) -> str:
        """Return what a server or libpq says as one line without the password."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return " ".join("".join(x if x.isprintable() else " " for x in text).split())[:_MOST_SHOWN]

    def options(self, timeouts: StoreTimeouts, application: str) -> dict[str, Any]:
        """Return what psycopg is to connect with: silence of a server ends a connection."""
        return {
            "conninfo": self._text,
            "application_name": application,
            "connect_timeout": round(timeouts.connect_seconds),
            "keepalives_idle": round(timeouts.answer_seconds),
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": round(1000 * timeouts.answer_seconds),
        }
