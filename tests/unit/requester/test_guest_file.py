"""guests.json: what one program changes another one sees, and a damaged one is a sentence."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ravnest.errors import ConfigError
from ravnest.hub.service.guests import GuestList
from ravnest.requester.run_folder import GuestFile


def test_a_folder_without_a_list_has_invited_everybody(tmp_path: Path) -> None:
    assert GuestFile(tmp_path).read() == GuestList()


def test_no_change_of_many_at_once_is_lost(tmp_path: Path) -> None:
    def invite(number: int) -> None:
        GuestFile(tmp_path).change(
            lambda known: known.invite(f"{number:016x}", f"n{number}", 0.0, None, None)
        )

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(invite, range(1, 41)))
    assert {each.name for each in GuestFile(tmp_path).read().invitations} == {
        "everybody",
        *(f"n{number}" for number in range(1, 41)),
    }
    assert stat.S_IMODE(os.stat(tmp_path / "guests.json").st_mode) == 0o600


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"invitations": [{"number": "../x"}]}', b"\xff" * 10]
)
def test_a_damaged_list_is_a_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "guests.json").write_bytes(content)
    with pytest.raises(ConfigError):
        GuestFile(tmp_path).read()
