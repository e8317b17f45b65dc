"""A PostgreSQL and a bucket of its own for each file that asks for them."""

import os
from collections.abc import Iterator

import pytest

from tests.support.store_servers import BUCKET, PostgresServer, bucket_server, postgres


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with postgres() as started:
        yield started


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    before = dict(os.environ)
    with bucket_server() as environment:
        os.environ.update(environment)
        yield f"s3://{BUCKET}"
    os.environ.clear()
    os.environ.update(before)
