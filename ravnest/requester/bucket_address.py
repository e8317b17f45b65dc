"""Where a bucket is, as people write it; read before it is remembered, and without boto3."""

import re
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from ravnest.errors import ConfigError

_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_MOST_LETTERS = 512  # S3 takes names of 1,024 bytes
BUCKET_FIX = (
    "write s3://BUCKET/PREFIX; keys come from AWS_ACCESS_KEY_ID or a profile, the server is AWS_ENDPOINT_URL"
)


@dataclass(frozen=True, slots=True)
class BucketAddress:
    """A checked s3://BUCKET/PREFIX; keys have no place in it, and are not quoted."""

    bucket: str
    prefix: str

    @classmethod
    def read(cls, text: str) -> Self:
        """Return what a text says, or raise ConfigError."""
        try:
            parts = urlsplit(text)
        except ValueError:
            raise ConfigError(f"--blobs is no address of a bucket; {BUCKET_FIX}") from None
        is_plain = parts.scheme == "s3" and not (parts.query or parts.fragment) and text.isprintable()
        if not is_plain or not _NAME.fullmatch(parts.netloc) or len(text) > _MOST_LETTERS:
            raise ConfigError(f"--blobs is no address of a bucket; {BUCKET_FIX}")
        return cls(parts.netloc, parts.path.strip("/"))

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")
