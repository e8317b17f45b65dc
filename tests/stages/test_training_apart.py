"""Three stages with an optimizer each follow the one process that trains the whole model."""

import pytest
import torch
from support.model_zoo import FAMILIES
from support.stage_runner import Alone, Hosts, subject

NUM_STEPS = 20
RATE = 1e-3

# Tensors of a few hundred numbers: more threads would only wait for each other.
pytestmark = pytest.mark.usefixtures("one_thread")


def optimizers_of(hosts: Hosts) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.AdamW(list(host.trainable.values()), lr=RATE) for host in hosts.hosts if host.trainable
    ]


def share_gradients(hosts: Hosts) -> None:
    """Give every holder of a tied weight the sum of the gradients of all holders."""
    total = hosts.gradients()
    for host in hosts.hosts:
        for name, tensor in host.trainable.items():
            if name in total:
                tensor.grad = total[name].clone()


def train(family: str, hosts: Hosts, alone: Alone) -> tuple[list[float], list[float]]:
    """Return the losses of both ways, batch by batch."""
    optimizers = optimizers_of(hosts)
    whole_optimizer = torch.optim.AdamW(alone.model.parameters(), lr=RATE)
    losses_apart, losses_alone = [], []
    for number in range(NUM_STEPS):
        batch = FAMILIES[family].batch(seed=100 + number % 4)
        losses_alone.append(alone.step(batch, seed=number).loss.item())
        whole_optimizer.step()
        losses_apart.append(hosts.step(batch, seed=number).loss.item())
        share_gradients(hosts)
        for optimizer in optimizers:
            optimizer.step()
    return losses_apart, losses_alone


@pytest.mark.parametrize("family", ["own_gpt", "resnet"])
def test_three_stages_follow_the_single_process(family):
    model = subject(family)
    third = model.num_positions // 3
    hosts, alone = model.apart([third - 1, 2 * third]), model.alone()
    losses_apart, losses_alone = train(family, hosts, alone)

    assert losses_apart == pytest.approx(losses_alone, rel=1e-5)
    assert losses_alone[-1] < losses_alone[0]
    for name, truth in alone.parameters():
        for held in hosts.holders(name):
            torch.testing.assert_close(held, truth, rtol=1e-5, atol=1e-6)
    for name, truth in alone.buffers().items():
        for held in hosts.holders(name):
            torch.testing.assert_close(held, truth, rtol=1e-5, atol=1e-6)
    evaluated = hosts.evaluate(model.sample.batch).loss.item()
    assert evaluated == pytest.approx(alone.evaluate(model.sample.batch).loss.item(), rel=1e-5)


def test_holders_of_a_tied_weight_stay_equal():
    model = subject("own_gpt")
    third = model.num_positions // 3
    hosts, alone = model.apart([third - 1, 2 * third]), model.alone()
    assert [host.blueprint.shared for host in hosts.hosts] == [("tokens.weight",), (), ("tokens.weight",)]
    before = hosts.holders("tokens.weight")[0].detach().clone()
    train("own_gpt", hosts, alone)
    first, last = hosts.holders("tokens.weight")
    assert first is not last
    assert torch.equal(first, last)
    assert not torch.equal(first, before)
