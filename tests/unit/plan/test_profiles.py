"""Built-in profiles: published parameter counts, believable work, shapes that fit together."""

from itertools import pairwise

import pytest

from ravnest.errors import ConfigError
from ravnest.plan.profiles import BUILTIN_NAMES, builtin_profile

# Published counts; positions; what a tied head adds because both ends of the line hold a copy.
MODELS = {
    "gpt2": (124_439_808, 26, 50257 * 768),
    "gpt2-xl": (1_557_611_200, 98, 50257 * 1600),
    "llama-7b": (6_738_415_616, 66, 0),
    "resnet50": (25_557_032, 18, 0),
    "bert-base": (109_514_298, 26, 30522 * 768),
}


def test_all_names_are_known():
    assert set(BUILTIN_NAMES) == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_the_published_ones(name):
    parameters, num_positions, tied = MODELS[name]
    profile = builtin_profile(name)
    assert profile.num_positions == num_positions
    assert sum(profile.parameter_bytes) / 4 - tied == parameters


@pytest.mark.parametrize("name", MODELS)
def test_entries_fit_together(name):
    profile = builtin_profile(name)
    length = profile.num_positions
    for column in (profile.matrix_bytes, profile.forward_flops, profile.saved_bytes):
        assert len(column) == length
    assert len(profile.crossing_bytes) == length + 1
    assert all(size > 0 for size in profile.crossing_bytes + profile.saved_bytes)
    assert all(
        0 <= matrices <= parameters
        for matrices, parameters in zip(profile.matrix_bytes, profile.parameter_bytes, strict=True)
    )
    assert profile.backward_flops == tuple(2 * work for work in profile.forward_flops)


@pytest.mark.parametrize("name", ["gpt2-xl", "llama-7b"])
def test_work_is_about_six_per_parameter_and_token(name):
    profile = builtin_profile(name)
    tokens = profile.crossing_bytes[0] / 8
    work = sum(profile.forward_flops) + sum(profile.backward_flops)
    assert 1.0 < work / (6 * MODELS[name][0] * tokens) < 1.15


def test_resnet50_forward_is_the_published_4_09_multiply_adds():
    profile = builtin_profile("resnet50", 1)
    assert sum(profile.forward_flops) / 2 == pytest.approx(4.089e9, rel=0.005)


def test_resnet50_maps_shrink_and_widen():
    sizes = [size / 4 for size in builtin_profile("resnet50", 1).crossing_bytes]
    assert sizes[0] == 3 * 224 * 224
    assert sizes[1:5] == [64 * 56 * 56] + [256 * 56 * 56] * 3
    assert sizes[-2] == 2048 * 7 * 7


# Floats per token, counted with PyTorch's saved-tensor hooks on blocks of the same make.
@pytest.mark.parametrize(
    ("name", "position", "floats"),
    [
        ("gpt2", 0, 2),  # an id
        ("gpt2", 1, 6 * 768 + 12 + 2),
        ("gpt2", 2, 2 * 768 + 2 * 3072 + 2),
        ("gpt2", -1, 2 * 768 + 2 + 50257 + 2),
        ("gpt2-xl", 1, 6 * 1600 + 25 + 2),
        ("llama-7b", 1, 6 * 4096 + 32 + 1),
        ("llama-7b", 2, 2 * 4096 + 4 * 11008 + 1),
        ("bert-base", 0, 2 + 768 + 2),
        ("bert-base", 1, 6 * 768 + 12 + 2),
        ("bert-base", -1, 4 * 768 + 2 + 30522 + 2),
    ],
)
def test_a_transformer_keeps_what_autograd_saves(name, position, floats):
    profile = builtin_profile(name)
    tokens = profile.crossing_bytes[0] / 8
    assert profile.saved_bytes[position] / tokens == 4 * floats


@pytest.mark.parametrize(
    ("position", "floats"), [(0, 2_157_568), (1, 2_609_152), (2, 2_408_448), (4, 2_609_152), (-1, 103_402)]
)
def test_resnet50_keeps_what_autograd_saves(position, floats):
    assert builtin_profile("resnet50", 1).saved_bytes[position] == 4 * floats


@pytest.mark.parametrize(
    ("name", "samples", "input_bytes", "label_bytes"),
    [
        ("gpt2", 8, 8 * 1024 * 8, 8 * 1024 * 8),
        ("gpt2-xl", 1, 1024 * 8, 1024 * 8),
        ("llama-7b", 1, 2048 * 8, 2048 * 8),
        ("bert-base", 16, 16 * 512 * 8, 16 * 512 * 8),
        ("resnet50", 32, 32 * 3 * 224 * 224 * 4, 32 * 8),
    ],
)
def test_default_batches(name, samples, input_bytes, label_bytes):
    profile = builtin_profile(name)
    assert profile.samples_per_batch == samples
    assert profile.crossing_bytes[0] == input_bytes
    assert profile.crossing_bytes[-1] == label_bytes


def test_work_of_each_kind_of_position():
    embedding, attention, mlp, *_, head = builtin_profile("gpt2", 1).forward_flops
    assert embedding == 1024 * 768
    assert attention == 2 * 4 * 768**2 * 1024 + 4 * 1024**2 * 768
    assert mlp == 2 * 2 * 768 * 3072 * 1024
    assert head == 2 * 50257 * 768 * 1024
    assert builtin_profile("bert-base", 1).forward_flops[-1] == 2 * (30522 + 768) * 768 * 512
    assert builtin_profile("resnet50", 1).forward_flops[-1] == 2 * 2048 * 1000


def test_matrices_leave_out_embedding_head_norms_and_biases():
    profile = builtin_profile("gpt2")
    assert profile.matrix_bytes[0] == profile.matrix_bytes[-1] == 0
    assert sum(profile.matrix_bytes) / 4 == 12 * 12 * 768**2


@pytest.mark.parametrize("name", MODELS)
def test_all_but_parameters_scale_with_the_batch(name):
    once, twice = builtin_profile(name, 3), builtin_profile(name, 6)
    assert (once.samples_per_batch, twice.samples_per_batch) == (3, 6)
    assert once.parameter_bytes == twice.parameter_bytes
    assert once.matrix_bytes == twice.matrix_bytes
    for key in ("forward_flops", "backward_flops", "saved_bytes", "crossing_bytes"):
        assert [2 * value for value in getattr(once, key)] == list(getattr(twice, key))


def test_inside_a_transformer_every_crossing_is_the_residual_stream():
    crossing = builtin_profile("gpt2-xl").crossing_bytes
    assert all(one == other for one, other in pairwise(crossing[1:-1]))
    assert crossing[1] == 1024 * 1600 * 4


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"'gpt5'.*gpt2-xl"):
        builtin_profile("gpt5")


@pytest.mark.parametrize("samples", [0, -1, 1_000_001])
def test_absurd_batches_are_refused(samples):
    with pytest.raises(ConfigError, match=str(samples)):
        builtin_profile("gpt2", samples)
