"""Hugging Face models that need other words to be captured: experts, LayerDrop, a backward in Python."""

from typing import Any

import pytest
import torch

from ravnest.model.capture.capture import capture
from ravnest.model.capture.huggingface import LAYERDROP, PLAIN_FUNCTIONS, plain_transformers, switched_off

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


def mixtral() -> Any:
    config = transformers.MixtralConfig(**SIZES, **HEADS, num_local_experts=3, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


def rows() -> dict[str, torch.Tensor]:
    ids = torch.arange(24).reshape(4, 6)
    return {"input_ids": ids, "labels": ids.clone()}


def test_all_experts_for_all_tokens_give_what_the_chosen_ones_give() -> None:
    torch.manual_seed(0)
    model = mixtral()
    expected = model(**rows(), use_cache=False).loss
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    with plain_transformers(rows().keys()):
        found = model(**rows(), use_cache=False).loss
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, list(model.parameters())), gradients)


def test_a_mixture_of_experts_is_captured_and_compared() -> None:
    torch.manual_seed(0)
    found = capture(mixtral(), rows())
    assert any(entry.name.endswith("experts.down_proj") for entry in found.blueprint.state)
    assert found.notes == ("all 3 experts compute every token, 1.5 times the work of the chosen ones",)


def test_layerdrop_is_switched_off_with_a_note_and_comes_back() -> None:
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=32,
        d_model=16,
        decoder_layers=2,
        decoder_attention_heads=2,
        decoder_ffn_dim=16,
        decoder_layerdrop=0.5,
        max_position_embeddings=16,
    )
    model = transformers.BartForCausalLM(config)
    found = capture(model, rows())
    assert LAYERDROP.note in found.notes
    assert {module.layerdrop for module in model.modules() if hasattr(module, "layerdrop")} == {0.5}
    names = {entry.name for entry in found.blueprint.state}
    assert {name for name, _ in model.named_parameters() if "self_attn" in name} <= names


def test_a_model_without_layerdrop_is_left_alone() -> None:
    with switched_off(mixtral()) as notes:
        assert not notes


def functions() -> dict[str, tuple[torch.Tensor, ...]]:
    """What the autograd functions of transformers are given, by name."""
    torch.manual_seed(0)
    x = torch.randn(4, 6).requires_grad_()
    chosen = x.argmax(-1, keepdim=True).detach()
    gates = torch.softmax(x.detach(), -1)
    return {
        "transformers.models.bloom.modeling_bloom.GeLUFunction": (x,),
        "transformers.models.recurrent_gemma.modeling_recurrent_gemma.SqrtBoundDerivative": (
            x.detach().abs().requires_grad_(),
        ),
        "transformers.models.phimoe.modeling_phimoe.PhimoeMultiplier": (
            x,
            gates.gather(-1, chosen),
            chosen,
            gates,
            torch.ones(4, 1),
        ),
    }


@pytest.mark.parametrize("name", sorted(functions()))
def test_a_backward_in_python_is_the_gradient_of_what_runs_instead(name: str) -> None:
    where, _, kind = name.rpartition(".")
    function = getattr(pytest.importorskip(where), kind)
    given = functions()[name]
    torch.manual_seed(1)
    weights = torch.randn(function.apply(*given).shape)
    expected, found = function.apply(*given), PLAIN_FUNCTIONS[name](*given)
    torch.testing.assert_close(found, expected)
    one, other = (torch.autograd.grad((out * weights).sum(), given[0])[0] for out in (expected, found))
    torch.testing.assert_close(other, one)


def tapas() -> Any:
    sizes = SIZES | {"num_attention_heads": 2, "max_position_embeddings": 16, "num_hidden_layers": 1}
    return transformers.TapasForMaskedLM(transformers.TapasConfig(**sizes))


def test_positions_within_the_cells_of_a_table_are_captured() -> None:
    torch.manual_seed(0)
    model, batch = tapas(), rows()
    cells = torch.zeros(4, 6, 7, dtype=torch.long)
    cells[:, :, 1] = torch.tensor(
        [1, 1, 2, 2, 2, 1]
    )  # columns, and rows: tokens of a cell need not be neighbours
    cells[:, :, 2] = torch.tensor([1, 1, 1, 1, 2, 1])
    cells[1, :, 1] = 1
    captured = capture(model, batch | {"token_type_ids": cells})
    assert any(entry.name.endswith("position_embeddings.weight") for entry in captured.blueprint.state)


def test_values_of_segments_are_looked_up_as_they_do_it() -> None:
    from transformers.models.tapas import modeling_tapas

    torch.manual_seed(0)
    index = modeling_tapas.IndexMap(torch.randint(0, 5, (3, 7)), 5, batch_dims=1)
    tables = (torch.randn(3, 5), torch.randn(3, 7, 2))
    expected = [modeling_tapas.gather(table, index) for table in tables]
    values = torch.randint(0, 50, (3, 7))
    least = modeling_tapas.gather(modeling_tapas.reduce_min(values, index)[0], index)
    with plain_transformers(()):
        for table, wanted in zip(tables, expected, strict=True):
            assert torch.equal(modeling_tapas.gather(table, index), wanted)
        found = modeling_tapas.gather(modeling_tapas.reduce_min(values, index)[0], index)
    assert torch.equal(found, least)


@pytest.mark.parametrize("num_landmarks", [2, 6])
def test_attention_by_landmarks_is_captured(num_landmarks: int) -> None:
    torch.manual_seed(0)
    config = transformers.NystromformerConfig(
        **SIZES, num_attention_heads=2, num_landmarks=num_landmarks, segment_means_seq_len=6
    )
    batch = rows() | ({} if num_landmarks == 2 else {"attention_mask": torch.ones(4, 6).triu(-3).long()})
    capture(transformers.NystromformerForMaskedLM(config), batch)
