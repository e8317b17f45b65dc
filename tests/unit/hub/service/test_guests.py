"""The guest list: invitations end, are withdrawn, have room for so many nodes, and remember strikes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest.errors import ConfigError
from ravnest.hub.service.guests import EVERYBODYS, MOST_STRIKES, GuestList, Invitation

ANNA = "a" * 16
DAY = 86_400.0


def guests(seconds: float | None = 7 * DAY, nodes: int | None = 2) -> GuestList:
    return GuestList().invite(ANNA, "anna", 1000.0, seconds, nodes)


def anna(known: GuestList) -> Invitation:
    found = known.find(ANNA)
    assert found is not None
    return found


def test_an_invitation_holds_until_its_end_and_for_so_many_nodes() -> None:
    found = anna(guests())
    assert found.reason_against(1, 1000.0 + 7 * DAY - 1) is None
    assert "ended on 1970-01-08 00:16 UTC" in str(found.reason_against(0, 1000.0 + 7 * DAY))
    assert "is for 2 nodes" in str(found.reason_against(2, 1000.0))
    assert anna(guests(None, None)).reason_against(10**6, 1e10) is None


def test_a_withdrawn_invitation_leaves_its_name_free_and_the_others_alone() -> None:
    after = guests().invite("b" * 16, "bob", 1000.0, None, None).revoke("anna")
    assert anna(after).reason_against(0, 1000.0) == "its invitation was withdrawn"
    assert after.named("bob").reason_against(0, 1000.0) is None
    assert after.invite("c" * 16, "anna", 2000.0, None, None).named("anna").number == "c" * 16
    with pytest.raises(ConfigError, match="there are: bob, everybody"):
        after.revoke("anna")


def test_everybody_can_be_shut_out_and_guests_still_come() -> None:
    after = guests().revoke("everybody")
    assert EVERYBODYS.reason_against(10**6, 1e10) is None
    assert after.find(EVERYBODYS.number).reason_against(0, 0.0) is not None  # type: ignore[union-attr]
    assert anna(after).reason_against(0, 1000.0) is None


def test_strikes_end_the_invitation_of_a_guest_and_never_that_of_everybody() -> None:
    known = guests()
    for number in range(MOST_STRIKES + 2):
        assert (anna(known).reason_against(0, 1000.0) is None) == (number < MOST_STRIKES)
        known = known.strike(ANNA, f"fault {number}").strike(EVERYBODYS.number, "fault").strike("?", "fault")
    assert "the last: fault 2" in str(anna(known).reason_against(0, 1000.0))
    assert known.find(EVERYBODYS.number) == EVERYBODYS


@pytest.mark.parametrize("name", ["", "x" * 41, "an\nna", "\x1b[2J", " anna", "anna"])
def test_a_name_that_misleads_or_is_taken_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        guests().invite("d" * 16, name, 0.0, None, None)


@given(st.lists(st.sampled_from(["invite", "revoke", "strike"]), max_size=20))
def test_at_most_one_invitation_of_a_name_holds(steps: list[str]) -> None:
    known = GuestList()
    for number, step in enumerate(steps):
        try:
            if step == "invite":
                known = known.invite(f"{number:016x}", "anna", 0.0, None, None)
            elif step == "revoke":
                known = known.revoke("anna")
            else:
                known = known.strike(known.named("anna").number, "fault")
        except ConfigError:
            continue
    assert sum(each.name == "anna" and not each.is_revoked for each in known.invitations) <= 1
