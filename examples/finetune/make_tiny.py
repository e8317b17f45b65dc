"""Write a very small Llama with random weights, its tokenizer and some data: python make_tiny.py FOLDER."""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "tiny-llama")
LETTERS = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,?!"
marks = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
words = {word: place for place, word in enumerate([*marks.values(), *LETTERS])}
letters = Tokenizer(models.WordLevel(words, unk_token=marks["unk_token"]))
letters.pre_tokenizer, letters.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
PreTrainedTokenizerFast(tokenizer_object=letters, **marks).save_pretrained(folder)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **sizes)).save_pretrained(folder)
pairs = [(a, b) for a in range(10) for b in range(10)]
rows = [{"prompt": f"What is {a} and {b}? ", "completion": f"It is {a + b}."} for a, b in pairs]
(folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
