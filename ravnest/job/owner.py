"""The requester's side of a run: model and data as bytes, cut and read for whoever hosts a part of them.

Nothing here is sent but blueprints, weights and the fields that a stage consumes. Driven by hub.server, which
calls it from threads.
"""

from collections.abc import Sequence

from ravnest.codec import describe, encode
from ravnest.config import WireFormat
from ravnest.engine.training import Training, write_training
from ravnest.hub.owner import Fields, Parts
from ravnest.job.job import Job
from ravnest.job.loading import users_code
from ravnest.model.blueprint import Program
from ravnest.model.capture import Captured
from ravnest.model.flat import to_safetensors
from ravnest.model.line import slice_blueprint
from ravnest.model.reading import write_blueprint


class JobOwner:
    """The Owner of a job that was captured."""

    def __init__(self, job: Job, captured: Captured, training: Training) -> None:
        self._job = job
        self._captured = captured
        self._training = training

    def make_parts(self, start: int, stop: int) -> Parts:
        """Cut the stage [start, stop) of the line."""
        stage = slice_blueprint(self._captured.blueprint, start, stop)
        trained = frozenset(entry.name for entry in stage.state if entry.is_trainable)
        return Parts(
            blueprint=write_training(self._training, trained) + b"\n" + write_blueprint(stage),
            weights=to_safetensors(self._captured.state, stage),
            train_fields=_fields(stage.train),
            evaluation_fields=_fields(stage.evaluate),
        )

    def read_fields(self, is_evaluation: bool, samples: Sequence[int], names: Sequence[str]) -> Fields:
        """Return these fields of a batch as they travel: exactly as they are."""
        data = self._job.val_samples if is_evaluation else self._job.samples
        assert data is not None, "without validation data nothing is evaluated"
        with users_code("the data"):
            batch = data.batch(samples)
        specs = tuple((name, describe(batch[name], WireFormat.FP32)) for name in names)
        return specs, tuple(encode(batch[name], WireFormat.FP32) for name in names)


def _fields(program: Program) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for _, name in program.fields))
