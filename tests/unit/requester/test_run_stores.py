"""Which addresses of shared stores count, and what hub.json remembers of them."""

from pathlib import Path

import pytest

from ravnest.errors import ConfigError
from ravnest.requester.run_folder import new_hub_file, read_hub_file, write_hub_file
from ravnest.requester.run_stores import SharedPlaces

LOG = "postgresql://ana@db/runs"


def test_a_hub_remembers_both_addresses_without_passwords_and_another_log_has_another_bucket() -> None:
    hub = new_hub_file()
    first = SharedPlaces.read("postgresql://ana:s3cret@db/runs", "s3://runs/mine/").remember_in(hub)
    assert (first.store, first.blobs) == (LOG, "s3://runs/mine")
    for store in ("", LOG, "postgresql://ana:s3cret@db/runs"):
        known = SharedPlaces.read(store, "").complete(first)
        assert (str(known.log), known.blobs) == (LOG, "s3://runs/mine")
        assert known.remember_in(hub) == first
    other = SharedPlaces.read("postgresql://ana@other/runs", "").complete(first).remember_in(first)
    assert (other.store, other.blobs) == ("postgresql://ana@other/runs", "")
    assert SharedPlaces.read(LOG, "s3://elsewhere/x").complete(first).blobs == "s3://elsewhere/x"
    assert SharedPlaces().complete(hub).remember_in(hub) == hub


@pytest.mark.parametrize(
    "blobs",
    ["s3://AKIAKEY:s3cret@runs/x", "https://runs/s3cret", "s3://", "s3://[s3cret", "s3://runs/s3cret\n"],
)
def test_a_bucket_whose_address_has_a_key_in_it_is_refused_before_it_is_remembered(blobs: str) -> None:
    with pytest.raises(ConfigError, match="write s3://BUCKET/PREFIX") as refused:
        SharedPlaces.read(LOG, blobs)
    assert "s3cret" not in str(refused.value)


def test_what_is_remembered_can_be_read_again(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        SharedPlaces.read(LOG, "s3://runs/" + "x" * 3_000)
    given = SharedPlaces.read(LOG + "?options=" + "x" * 1_900, "s3://runs/" + "x" * 500)
    long = given.remember_in(new_hub_file())
    write_hub_file(tmp_path, long)
    assert read_hub_file(tmp_path) == long
