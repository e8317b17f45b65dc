"""A folder in an S3-compatible bucket: files go there whole, and come back bounded.

Keys and the server's address come from boto3's usual places (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, profiles);
an error names the address of the folder, never a key.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
from boto3.exceptions import Boto3Error  # type: ignore[import-untyped]
from botocore.config import Config  # type: ignore[import-untyped]
from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped]

from ravnest.config import StoreTimeouts
from ravnest.errors import BucketError, BucketLacks, ConfigError
from ravnest.requester.bucket_address import BUCKET_FIX, BucketAddress
from ravnest.units import show_bytes

_PIECE_BYTES = 1 << 20
_MOST_DELETED = 1_000  # by one request


class Bucket:
    """The files below s3://BUCKET/PREFIX. Every method may be called from any thread."""

    def __init__(self, address: str, timeouts: StoreTimeouts) -> None:
        self._address = BucketAddress.read(address)
        self._name, self._prefix = self._address.bucket, self._address.prefix
        seconds = {"connect_timeout": timeouts.bucket_seconds, "read_timeout": timeouts.bucket_seconds}
        # Not every server knows the newer checksums, and all content has a hash of its own.
        sums = {"request_checksum_calculation": "when_required"}
        sums["response_checksum_validation"] = "when_required"
        options = Config(**seconds, **sums, retries={"mode": "standard", "total_max_attempts": 3})
        with self._unusable(), self._explained():
            self._client: Any = boto3.session.Session().client("s3", config=options)

    def __str__(self) -> str:
        return str(self._address)

    def check(self) -> None:
        """Raise ConfigError if the bucket is not there, or not ours."""
        with self._unusable(), self._explained():
            self._client.head_bucket(Bucket=self._name)

    def send(self, file: Path, name: str) -> None:
        """Put a file there; it appears whole or not at all."""
        with self._explained():
            self._client.upload_file(str(file), self._name, self._key(name))

    def read(self, name: str, most_bytes: int) -> bytes:
        """Return what a small file holds."""
        return b"".join(self._pieces(name, most_bytes))

    def fetch(self, name: str, file: Path, most_bytes: int) -> None:
        """Write what a file holds to one on this PC, which is not there yet."""
        with file.open("xb") as opened:
            for piece in self._pieces(name, most_bytes):
                opened.write(piece)

    def find(self, folder: str) -> list[str]:
        """Return the names of all files below a folder, from that folder on."""
        start, found = self._key(folder) + "/", []
        with self._explained():
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._name, Prefix=start)
            for page in pages:
                found += [each["Key"].removeprefix(start) for each in page.get("Contents", ())]
        return found

    def remove(self, names: Sequence[str]) -> None:
        """Remove files."""
        with self._explained():
            for index in range(0, len(names), _MOST_DELETED):
                keys = [{"Key": self._key(name)} for name in names[index : index + _MOST_DELETED]]
                self._client.delete_objects(Bucket=self._name, Delete={"Objects": keys, "Quiet": True})

    def _pieces(self, name: str, most_bytes: int) -> Iterator[bytes]:
        with self._explained():
            got = self._client.get_object(Bucket=self._name, Key=self._key(name))
            with contextlib.closing(got["Body"]) as body:
                for piece in body.iter_chunks(_PIECE_BYTES):
                    most_bytes -= len(piece)
                    if most_bytes < 0:
                        raise BucketLacks(f"{self}: {name} is {show_bytes(-most_bytes)} too large")
                    yield piece

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    @contextlib.contextmanager
    def _unusable(self) -> Iterator[None]:
        try:
            yield
        except BucketError as error:
            raise ConfigError(f"{error}; {BUCKET_FIX}") from None

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except ClientError as error:
            said = error.response.get("Error", {})
            what = f"{_plain(said.get('Code'))} ({_plain(said.get('Message'))})"
            kind = BucketLacks if said.get("Code") == "NoSuchKey" else BucketError
            raise kind(f"{self}: {what}") from None
        except (BotoCoreError, Boto3Error, ValueError) as error:
            raise BucketError(f"{self}: {_plain(error)}") from None


def _plain(said: object) -> str:
    """Return a server's words as one short line, with no key in them."""
    text = re.sub(r"\b[A-Z0-9]{16,}\b", "***", str(said))
    text = re.sub(r"//[^/\s]*@", "//***@", text)  # of a server's address
    return " ".join("".join(x if x.isprintable() else " " for x in text).split())[:200]
