"""Who comes and goes, and what that means for what is trained: the first half of hub.state.

While clusters train they are mended; at the end another one takes over; and when nobody is left who has what
was trained it begins again, from the last checkpoint if there is one.
"""

from dataclasses import replace

from ravnest.hub.events import (
    Abandon,
    Dismiss,
    JobGiven,
    Order,
    PeerJoined,
    PeerReturned,
    Phase,
    Restarted,
    Send,
    Tell,
)
from ravnest.hub.forming import Forming
from ravnest.hub.guarding import Alarm, Guard
from ravnest.hub.hearing import Hearing
from ravnest.hub.keeping import Keeping
from ravnest.hub.members import ClusterState, Members, is_sensible
from ravnest.hub.mending import Mending
from ravnest.hub.news import ClusterDissolved, Joined, Left, Resumed, Returned, WentWrong, WorkLost
from ravnest.hub.rounds import Ended, Rounds
from ravnest.hub.training import Training
from ravnest.plan.types import NodeId
from ravnest.protocol import Leave, Stop

_MOST_ALARMS = 3
Ordered = list[Order] | str  # orders, or why the event is refused


class Crew:
    """Everything the hub remembers, and what it does when somebody comes, goes or comes back."""

    def __init__(self) -> None:
        self.now = 0.0  # of the last event; a program that goes on after a restart counts on from it
        self.phase = Phase.COLLECTING
        self._job: JobGiven | None = None
        self._members = Members()
        self._rounds = Rounds()
        self.books: Training | None = None  # from the job on
        self._forming = Forming()
        self._keeping = Keeping()
        self._mending = Mending(self._members, self._keeping)
        self._stop_by: float | None = None  # once it is stopped
        self._end_by: float | None = None  # once all is trained, and a cluster stands still
        self._guard = Guard()
        self._hearing = Hearing(self._members, self._keeping, self._mending, self._forming, self._guard)
        self._num_alarms = 0  # since the last checkpoint

    @property
    def _can_mend(self) -> bool:
        """Whether clusters are repaired: until the end, or until somebody has what is to be kept."""
        return self.phase is Phase.TRAINING and (self._stop_by is None or not self._members.running)

    @property
    def _training(self) -> Training:
        assert self.books is not None, "nobody has a stage before there is a job"
        return self.books

    def is_at(self, job: JobGiven) -> bool:
        """Return whether this very job is under way, whoever is expected to do it."""
        if self._job is None or self.phase is Phase.FINISHED or self._stop_by is not None:
            return False
        same = {"expected_nodes": 0, "settle_seconds": 0.0}
        mine, other = replace(self._job.settings, **same), replace(job.settings, **same)  # type: ignore[arg-type]
        return mine == other and self._job.profile == job.profile and self._job.config == job.config

    def find_missing(self, key: str, epoch: int) -> NodeId | None:
        """Return under what name somebody with this key is waited for, if it has the state it is to have."""
        found = (each for each in self._members.missing if each.key == key)
        return next((x.node.name for x in found if x.held is None or x.epoch == epoch), None)

    def find_parting(self, name: NodeId) -> str:
        """Return whether somebody is missing or leaving, in one word."""
        member = self._members.find(name)
        if member is None or member.back_by is not None:
            return "missing"
        return "leaving" if member.leaves_by is not None else ""

    def needs_parts(self, interval: tuple[int, int]) -> bool:
        """Return whether the weights of an interval are worth keeping, for somebody may ask for them."""
        return self._members.needs_parts(interval)

    def find_others(self, key: str) -> set[NodeId]:
        """Return the names of all members with another key."""
        return {name for name in self._members if (x := self._members.find(name)) and x.key != key}

    def _restart(self, event: Restarted) -> Ordered:
        if self._job is None or self.phase is Phase.FINISHED:
            return "there is nothing to go on with"
        ended = self._rounds.cancel("the hub was away", self.now)
        orders: list[Order] = [Tell(Resumed(self._training.num_counted, len(self._members)))]
        orders += self._end_round(ended) if ended else []
        self._mending.forget_held()
        self._end_by = None
        orders += self._mending.restart(event.books, self._training, self.now)
        self._rounds.restart()
        self._forming.note_change(self.now)
        self.phase = Phase.TRAINING if self._members.clusters else Phase.COLLECTING
        return orders

    def _take_back(self, event: PeerReturned) -> Ordered:
        member = self._members.find(event.node)
        if member is None or member.back_by is None:
            return f"nobody waits for {event.node}"
        self._members.replace(replace(member, back_by=None, addresses=event.addresses))
        self._forming.note_change(self.now)
        return [Tell(Returned(event.node))]

    def _join(self, event: PeerJoined) -> Ordered:
        name = event.node.name
        if not is_sensible(event.node):
            return f"{name} cannot join: no machine is like {event.node}"
        gone = self._leave(name, "it came back as new") if name in self._members else []
        assert isinstance(gone, list)
        gone = [order for order in gone if not isinstance(order, Send) or order.to != name]
        sends = self._members.join(event)
        self._forming.note_change(self.now)
        if self.phase is Phase.FINISHED:
            sends = [Send(name, Stop("the job is done"))]
        return [*gone, Tell(Joined(name)), *sends]

    def _part(self, name: NodeId, leave: Leave) -> Ordered:
        """Let somebody go: at once, or when others have what it has."""
        if leave.can_hand_over and self._can_mend and self._mending.needs(name):
            self._forming.note_change(self.now)
            return self._mending.part(name, leave.reason, self.now)
        gone = self._leave(name, leave.reason)
        return gone if isinstance(gone, str) else [*gone, Dismiss(name, "goodbye")]

    def _leave(self, name: NodeId, reason: str, since: float | None = None) -> Ordered:
        if name not in self._members:
            return f"{name} is no member, so it cannot leave"
        cluster, ended = self._members.leave(name), self._rounds.leave(name, reason, self.now)
        self._hearing.speeds.forget(name)
        self._mending.forget(name)
        self._forming.note_change(self.now)
        orders: list[Order] = [Tell(Left(name, reason))]
        if self.phase is Phase.FINISHED:
            return orders
        orders += self._end_round(ended) if ended else []
        if cluster is not None and self._can_mend:
            since = self.now if since is None else since
            orders += self._mending.lose(cluster, f"{name}: {reason}", self._training, since)
        elif cluster is not None:
            orders += self._give_up(cluster, f"{name}: {reason}")
        is_empty = self._job is not None and self.phase is Phase.COLLECTING and not len(self._members)
        return [*orders, *(self._forming.tell_shortage() if is_empty else [])]

    def _give_up(self, cluster: ClusterState, reason: str) -> list[Order]:
        given_back, lost = self._training.release(cluster)
        orders: list[Order] = [*self._members.dissolve([cluster])]
        orders.append(Tell(ClusterDissolved(cluster.name, reason, given_back, lost)))
        self._keeping.lose(cluster)
        is_new = not self._training.num_counted
        if any(is_new or self._training.knows(each) for each in self._members.running):
            return orders
        return orders + self._start_over()

    def _roll_back(self, alarm: Alarm) -> list[Order]:
        """Go back to the last checkpoint, if there is one; too often in a row is the end."""
        self._num_alarms += 1
        self._guard.go_back()
        has_checkpoint = self._mending.saved is not None
        told = Tell(WentWrong(alarm.reason, alarm.suspect, has_checkpoint))
        if self._num_alarms <= _MOST_ALARMS:
            return [told, *(self._start_over() if has_checkpoint else [])]
        self._training.stop()
        self._training.give_up_leases()
        self.phase = Phase.FINISHED
        stops = [Send(name, Stop("the job was ended by its guard")) for name in self._members]
        told_why = f"{alarm.reason}, seen first at {alarm.suspect}, for the {self._num_alarms}th time"
        advice = "lower the learning rate, or look at the data; the last good checkpoint is kept"
        return [told, *stops, Abandon(f"training is ended: {told_why}; {advice}", is_guarded=True)]

    def _start_over(self) -> list[Order]:
        """Go back to collecting, with what the hub has and all who are here; or end, if it is stopped."""
        ended = self._rounds.cancel("training begins again", self.now)
        orders: list[Order] = self._end_round(ended) if ended else []
        for cluster in self._members.clusters:
            self._keeping.lose(cluster)
        orders += self._members.dissolve(self._members.clusters)
        lost = self._training.restart(self._mending.saved)
        self._mending.forget_held()
        self._end_by = None
        self._rounds.restart()
        self._guard.go_back()
        self._forming.note_change(self.now)
        self.phase = Phase.COLLECTING
        if self._stop_by is None:
            return orders + ([Tell(WorkLost(lost))] if lost else [])
        self.phase = Phase.FINISHED
        orders += [Send(name, Stop("the job was stopped")) for name in self._members]
        return [*orders, Abandon("the job was stopped when no cluster had anything to keep")]

    def _end_round(self, ended: Ended) -> list[Order]:
        if ended.told.is_committed:
            took_part = {send.to for send in ended.sends}
            clusters = (each for each in self._members.running if each.root in took_part)
            self._training.note_averaged(clusters, ended.told.round_id)
        return [*ended.sends, Tell(ended.told)]
