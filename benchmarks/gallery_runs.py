"""Runs of the gallery: an example in a swarm on this PC, or in one process as anyone would write it.

Both train the same job: the same samples in the same order, the same number of updates. A plain loop has the
optimizer of the job, or AdamW 1e-3 where the job leaves the choice to Ravnest.
"""

import math
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples"
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Example:
    """An example, and what it is judged by: a metric in points, or the loss.

    Most leave the optimizer to Ravnest. Then one node trains them with that recipe, too.
    """

    name: str
    score: str = "loss"
    has_recipe: bool = True


GALLERY = {
    each.name: each
    for each in (
        Example("gpt2"),
        Example("bert", "accuracy"),
        Example("vit", "accuracy"),
        Example("whisper", "accuracy"),
        Example("diffusion"),
        Example("tabular", has_recipe=False),
        Example("dlrm"),
        Example("clip", "found"),
        Example("lora"),
        Example("qlora"),
    )
}


@dataclass(frozen=True, slots=True)
class GalleryRun:
    """What is run, and its key in a file; without nodes it is a plain loop, one node is the recipe alone."""

    example: str
    seed: int
    nodes: int = 0
    is_tiny: bool = False


def load_example(name: str, seed: int = 0, *, is_tiny: bool = False) -> Any:
    """Return the job of an example, with another order of its samples for each seed."""
    import importlib.util

    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / name / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return replace(module.job(tiny=is_tiny), seed=seed)


def make_run(run: GalleryRun) -> Record:
    """Train, evaluate on the validation data, and return the figures; for a process of its own."""
    import torch

    torch.set_num_threads(1)  # programs share the cores
    os.environ["OMP_NUM_THREADS"] = "1"
    job = load_example(run.example, run.seed, is_tiny=run.is_tiny)
    first = Scorer(job).evaluate()
    begun, cpu_begun = time.perf_counter(), _cpu_seconds()
    found = _train_swarm(job, run.nodes) if run.nodes else _train_plainly(job)
    spent = {"seconds": time.perf_counter() - begun, "cpu_seconds": _cpu_seconds() - cpu_begun}
    scores = Scorer(job).evaluate()
    assert all(math.isfinite(value) for value in scores.values()), scores
    facts = {"samples": len(job.samples), "updates": job.num_updates, **spent}
    facts["parameters"] = sum(each.numel() for each in job.model.parameters() if each.requires_grad)
    return {"run": asdict(run), "first": first, "scores": scores, **facts, **found}


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of those that it has started and that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def _train_swarm(job: Any, nodes: int) -> Record:
    import ravnest as rv

    plans: list[Any] = []

    def watch(notice: object) -> None:
        if isinstance(notice, rv.notices.PlanFormed):
            plans.append(notice.plan)

    with rv.local(nodes=nodes) as hub:
        result = hub.fit(job, callbacks=[watch])
    with tempfile.TemporaryDirectory() as folder:  # as someone would who has no Ravnest
        from safetensors.torch import load_file

        result.export(Path(folder, "model.safetensors"))
        job.model.load_state_dict(load_file(Path(folder, "model.safetensors")))
    reported = {name.removeprefix("val_"): v for name, v in result.metrics.items() if name.startswith("val_")}
    return {"stages": [len(cluster.stages) for cluster in plans[-1].clusters], "reported": reported}


def _train_plainly(job: Any) -> Record:
    import torch

    torch.manual_seed(1_000_003 + job.seed)
    scorer = Scorer(job)
    parameters = [each for each in job.model.parameters() if each.requires_grad]
    is_own = isinstance(job.optimizer, torch.optim.Optimizer)
    optimizer = job.optimizer if is_own else torch.optim.AdamW(parameters, lr=1e-3)
    job.model.train()
    for batch in _batches(job):
        scorer.score(batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        if is_own and job.schedule is not None:
            job.schedule.step()
    return {"loop": f"{type(optimizer).__name__} {1e-3 if not is_own else optimizer.defaults['lr']:g}"}


def _batches(job: Any) -> Iterator[Any]:
    """Give the batches of the whole job, in the order of the swarm."""
    import numpy as np

    from ravnest.hub.coordinator.leases import permute

    count, num_left = len(job.samples), job.num_updates
    for epoch in range(job.epochs):
        order = permute(np.arange(count), count, job.seed, epoch)
        for first in range(0, count, job.batch_size)[:num_left]:
            yield job.samples.batch(order[first : first + job.batch_size])
        num_left -= job.batches_per_epoch


class Scorer:
    """The loss and the metrics of a job's model on batches."""

    def __init__(self, job: Any) -> None:
        from ravnest.model.capture.model_with_loss import ModelWithLoss, name_fields

        first = job.first_batch()
        fields, is_tuple = name_fields(first, job.is_padded), not isinstance(first, dict)
        self._job = job
        self._whole = ModelWithLoss(
            job.model, fields, job.loss, job.metrics or {}, is_tuple=is_tuple, inputs=job.inputs
        )

    def score(self, batch: Any) -> dict[str, Any]:
        """Return the loss and the metrics as tensors."""
        found: dict[str, Any] = self._whole(*batch.values())
        return found

    def evaluate(self) -> dict[str, float]:
        """Return the means over the validation data, batch by batch."""
        import torch

        job, sums = self._job, dict[str, float]()
        job.model.eval()
        count = len(job.val_samples)
        with torch.no_grad():
            for first in range(0, count, job.batch_size):
                numbers = range(first, min(first + job.batch_size, count))
                for name, value in self.score(job.val_samples.batch(numbers)).items():
                    sums[name] = sums.get(name, 0.0) + float(value) * len(numbers)
        return {name: total / count for name, total in sums.items()}
