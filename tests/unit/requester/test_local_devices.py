"""Which devices the peers of one PC share, and what is said where there is none."""

import pytest
import torch

from ravnest.errors import ConfigError
from ravnest.requester.local_peers import share_memory
from ravnest.requester.session import local


def test_peers_on_a_cpu_share_its_memory():
    one, two = share_memory(1), share_memory(2)
    assert [peer.device for peer in (*one, *two)] == ["cpu"] * 3
    assert two[0].memory_bytes < one[0].memory_bytes


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_here_is_named(device):
    with pytest.raises(ConfigError, match=f'device is "{device}", but torch sees no GPU on this PC'):
        local(2, device=device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_peers_share_all_gpus_in_turn():
    peers = share_memory(3, "cuda")
    assert {peer.device for peer in peers} <= {f"cuda:{n}" for n in range(torch.cuda.device_count())}
    assert all(peer.memory_bytes > 0 for peer in peers)
