"""A Hugging Face folder of a very small Llama with random weights and a tokenizer of single letters."""

from pathlib import Path
from typing import Any

LETTERS = "abcdefghijklmnopqrstuvwxyz 0123456789.,?!:<>|\n"
CHAT = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def write_tiny_llama(folder: Path, num_layers: int = 2, *, is_bf16: bool = False) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = LlamaForCausalLM(config)
    model.to(torch.bfloat16 if is_bf16 else torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *LETTERS])}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.decoder = decoders.Fuse()
    words = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, **words)
    tokenizer.chat_template = CHAT
    return tokenizer


def sums(count: int) -> list[dict[str, str]]:
    """Return prompts with completions that a model can learn."""
    pairs = [(number % 7, number // 7 % 7) for number in range(count)]
    return [{"prompt": f"{a} and {b}? ", "completion": f"{a + b}."} for a, b in pairs]
