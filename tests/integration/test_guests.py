"""A guest with a token of its own: it trains like the others, and leaves when it is withdrawn."""

import os
from pathlib import Path

from support.forked import Forked
from support.small_swarm import ENDLESS, JOIN, MEMORY_BYTES, PLAN, PROGRAM, check_books, joining, make_job

import ravnest as rv
from ravnest.hub.coordinator.notices import ClusterStarted, EpochDone, Left, Notice
from ravnest.net.identity import read_token

END_SECONDS = 120
HERE = "127.0.0.1:0"


def lent(name: str) -> tuple[str, ...]:
    return (*JOIN[len(PROGRAM) :], "--name", name, "--memory", f"{2 * MEMORY_BYTES} B", "--listen", HERE)


def test_a_guest_trains_until_its_invitation_is_withdrawn_and_the_others_train_on(tmp_path: Path) -> None:
    told: list[Notice] = []

    def follow(notice: Notice) -> None:
        told.append(notice)
        left = any(isinstance(each, Left) and each.node == "anna" for each in told)
        if isinstance(notice, ClusterStarted) and "anna" in notice.nodes:
            hub.revoke("anna")
        if isinstance(notice, EpochDone) and left:
            hub.stop("the test has seen enough")

    with rv.Hub(HERE, folder=tmp_path / "run", plan=PLAN, tell=follow) as hub:
        token = hub.invite("anna", days=1, nodes=1)
        environment = {**os.environ, "RAVNEST_TOKEN": token, "OMP_NUM_THREADS": "1"}
        guest = Forked(lent("anna"), environment, tmp_path / "anna.txt")
        try:
            more = ("--memory", f"{2 * MEMORY_BYTES} B", "--listen", HERE)
            with joining(read_token(hub.invitation), more, more):
                hub.fit(make_job(epochs=ENDLESS), nodes=3)
            said = guest.communicate(timeout=END_SECONDS)[1]
        finally:
            guest.kill()
            guest.communicate()
    assert guest.returncode == 5, said
    assert "its invitation was withdrawn" in said
    assert [each.node for each in told if isinstance(each, Left)][:1] == ["anna"]
    check_books(told, epochs=None)
