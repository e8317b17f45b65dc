"""An address of PostgreSQL is shown without its password, and refused without being quoted."""

import pytest

from ravnest.errors import ConfigError
from ravnest.hub.service.postgres_address import PostgresAddress


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("postgresql://ana:s3cret@db.example.org:5432/runs", "postgresql://ana@db.example.org:5432/runs"),
        ("postgres://ana:s3c%40ret@db/runs?sslmode=require", "postgres://ana@db/runs?sslmode=require"),
        ("postgresql://ana@/runs?host=/run/pg&password=s3cret", "postgresql://ana@/runs?host=/run/pg"),
        ("postgresql://a,b:5433/runs", "postgresql://a,b:5433/runs"),
        ("postgresql:///runs", "postgresql:///runs"),
        (
            "postgresql://db/runs?p%61ssword=s3c&options=-c%20a%3Db&application_name=a+b",
            "postgresql://db/runs?options=-c%20a%3Db&application_name=a+b",
        ),
        ("postgresql://db/runs?scram_client_key=s3c&oauth_client_secret=s3c", "postgresql://db/runs"),
    ],
)
def test_no_password_is_shown(given: str, shown: str) -> None:
    address = PostgresAddress(given)
    assert "s3c" not in repr(address) + str(address)
    assert str(address) == shown
    assert str(PostgresAddress(shown)) == shown, "it is the same when it is remembered"


def test_what_a_server_says_is_one_line_without_the_password() -> None:
    address = PostgresAddress("postgresql://ana:s3c%40ret@db/runs")
    said = address.redact('wrong: "s3c%40ret"\nis s3c@ret \x1b[31m' + "x" * 1000)
    assert said.startswith('wrong: "***" is ***  [31mxx'.replace("  ", " "))
    assert len(said) <= 300


@pytest.mark.parametrize(
    "given",
    [
        "mysql://ana:s3cret@db/runs",
        "ana:s3cret@db/runs",
        "postgresql://ana:s3@cret@db/runs",
        "postgresql://ana:s3/cret@db/runs",
        "postgresql://ana:s3#cret@db/runs",
        "postgresql://ana:s3?cret@db/runs",
        "postgresql://ana:s3cret",
        "postgresql://[s3cret",
        "postgresql:/ana:s3cret",
        "postgresql://ana:12?s3=cret@db/runs",
        "postgresql://ana:s3cret@db/" + "x" * 2_000,
    ],
)
def test_an_address_that_cannot_be_read_is_refused_and_not_quoted(given: str) -> None:
    with pytest.raises(ConfigError, match="write postgresql://USER@HOST") as refused:
        PostgresAddress(given)
    assert "cret" not in str(refused.value)
