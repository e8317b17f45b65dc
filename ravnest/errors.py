"""The exception tree. Each class says who catches it; a message names the thing, the value, the way out."""


class RavnestError(Exception):
    """Anything Ravnest reports to a person; `exit_code` is what the command ends with."""

    exit_code = 1


class ConfigError(RavnestError):
    """A file, key or value the user gave is not usable. Caught by the cli."""

    exit_code = 3


class StoreAway(ConfigError):  # noqa: N818 - what happened, not that it is an error
    """A log's server does not answer now: nothing is known of the log. Who can wait for it tries again."""


class PlanError(RavnestError):
    """No plan exists for these nodes and this model. The hub shows the reason, the cli exits with it."""

    exit_code = 6


class CaptureError(RavnestError):
    """A model cannot become a blueprint; names the user's file and line. Caught by the cli."""

    exit_code = 3


class UnsafeBlueprint(RavnestError):  # noqa: N818 - what it is, not that it is an error
    """A blueprint that this PC will not run, and why. The peer refuses it and tells the hub."""

    exit_code = 5


class UnknownBatchSize(UnsafeBlueprint):
    """An operation needs the batch size, but nothing that arrives at its stage has it. Capture says where."""

    def __init__(self, operation: str, number: int) -> None:
        super().__init__(
            f"operation {number} '{operation:.60}' needs the batch size, but nothing that arrives at its "
            "stage has it"
        )
        self.place = (operation, number)


class WeightsError(RavnestError):
    """A weights file that is damaged or of another model. The peer fetches another, the cli shows it."""

    exit_code = 3


class GuardError(RavnestError):
    """Training went wrong again and again, and was ended. Caught by the cli."""

    exit_code = 7


class ProtocolError(RavnestError):
    """A message that does not fit what was agreed. The peer that sent it is dropped."""


class WireVersionError(ProtocolError):
    """A message of another version of ravnest: its sender is no liar, only older or newer."""


class FencedOff(RavnestError):  # noqa: N818 - what happened, not that it is an error
    """Another hub has taken this run over, so this one may write nothing more. Caught by the cli."""

    exit_code = 9


class BucketError(RavnestError):
    """A bucket cannot be read or written. Whoever asked it says what that means for the run."""

    exit_code = 3


class BucketLacks(BucketError):  # noqa: N818 - what is so, not that it is an error
    """A file is not in a bucket, or is not what it could be. What else the bucket has can be read."""


class LinkError(RavnestError):
    """A neighbour cannot be reached or does not answer. Retried, then repaired."""

    exit_code = 4


class NotAdmitted(RavnestError):  # noqa: N818 - what happened, not that it is an error
    """The hub does not let this peer in, and says why. Caught by the cli."""

    exit_code = 5


class ComputeLost(RavnestError):  # noqa: N818 - what happened, not that it is an error
    """The process that computes has ended, and with it the stage. The peer tells the hub and joins again."""
