"""The page below a notebook's cell: what it shows, how often it is drawn, whose words it escapes."""

from dataclasses import replace

from ravnest.hub.coordinator.notices import DashboardOpened, Joined, Trained
from ravnest.hub.coordinator.phases import JobPhase, NodePhase
from ravnest.hub.service.status import NO_JOB, MemberStatus
from ravnest.ids import NodeId
from ravnest.requester.notebook_progress import NotebookProgress, find_notebook, show_page

STATUS = replace(
    NO_JOB,
    phase=JobPhase.TRAINING,
    job="net",
    num_samples=250,
    num_total=1000,
    epoch=2,
    samples_per_second=25.0,
    loss=0.5,
    validation={"accuracy": 0.875, "other": None},
    members=(
        MemberStatus(NodeId("fay"), NodePhase.SPARE),
        MemberStatus(NodeId("ana"), NodePhase.HOSTING, "A", 0),
    ),
)


class Tracker:
    def __init__(self, status) -> None:
        self.found = status

    def status(self):
        return self.found


class Cell:
    """What a notebook shows: a list of pages for every training."""

    def __init__(self) -> None:
        self.now = 0.0
        self.places: list[list[str]] = []
        self.progress = NotebookProgress(self._open, clock=lambda: self.now)

    def _open(self):
        self.places.append([])
        return self.places[-1].append


def test_a_page_has_the_bar_the_numbers_and_the_nodes_in_the_order_of_the_line() -> None:
    page = show_page(STATUS, ("ana joined",))
    assert 'value="0.2500"' in page
    for fact in ("25%", "training", "epoch 2", "loss 0.5", "val accuracy 0.875", "25 samples/s", "30 s left"):
        assert fact in page
    assert "other" not in page
    assert page.index("ana") < page.index("fay")
    assert "ana joined" in page


def test_without_a_job_there_is_no_rate_and_nothing_is_divided_by_nothing() -> None:
    page = show_page(NO_JOB)
    assert 'value="0.0000"' in page
    assert "left" not in page
    assert show_page(None) == show_page(None, ())


def test_words_of_others_are_no_html() -> None:
    nasty = "<script>alert(1)</script>"
    hostile = replace(STATUS, members=(MemberStatus(NodeId(nasty), NodePhase.HOSTING, nasty, 1),))
    page = show_page(hostile, (nasty,), 'http://x/"><script>')
    assert "<script" not in page
    assert page.count("&lt;script&gt;") == 4


def test_many_nodes_are_counted_not_listed() -> None:
    members = tuple(MemberStatus(NodeId(f"n{number}"), NodePhase.SPARE) for number in range(100))
    page = show_page(replace(STATUS, members=members))
    assert "and 76 more" in page
    assert page.count("<tr>") == 1 + 24 + 1


def test_it_is_drawn_at_most_every_quarter_of_a_second_and_once_more_in_the_end() -> None:
    cell = Cell()
    with cell.progress as progress:
        for _ in range(10):
            progress.look(Tracker(STATUS))
        cell.now = 0.3
        progress.look(Tracker(replace(STATUS, num_samples=500)))
        progress.look(Tracker(replace(STATUS, num_samples=1000)))
    (pages,) = cell.places
    assert ["2500" in pages[0], "5000" in pages[1], "1.0000" in pages[2]] == [True] * 3
    assert len(pages) == 3


def test_the_next_training_has_a_place_of_its_own_and_nothing_of_the_last() -> None:
    cell = Cell()
    with cell.progress as progress:
        progress(DashboardOpened("http://127.0.0.1:1/"))
        progress(Joined("ana"))
        progress(Trained(1, 2, 1, 0.5))
    with cell.progress:
        pass
    first, second = cell.places
    assert "ana joined" in first[-1]
    assert "http://127.0.0.1:1/" in first[-1]
    assert "50%" not in first[-1], "the bar says how far it is"
    assert second == [show_page(None)]


def test_a_terminal_is_no_notebook() -> None:
    assert find_notebook() is None
