"""GPT-2 from scratch: it learns to write Python from the sources of the standard library, byte by byte.

ravnest train examples/gpt2/model.py:job --nodes 3
python examples/gpt2/model.py    # the same, and then it writes a few lines
"""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import ravnest as rv

LENGTH = 64


def load_pieces(num_train: int, num_val: int) -> tuple[Tensor, Tensor]:
    """Return pieces of LENGTH bytes; every tenth file of the standard library is for validation."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [file.read_bytes() for file in files]
    train = b"".join(text for number, text in enumerate(texts) if number % 10)
    return cut(train, num_train), cut(b"".join(texts[::10]), num_val)


def cut(text: bytes, count: int) -> Tensor:
    """Return pieces from all over a text."""
    starts = torch.randint(len(text) - LENGTH, (count, 1), generator=torch.Generator().manual_seed(0))
    corpus = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return corpus[starts + torch.arange(LENGTH)].long()


def job(tiny: bool = False) -> rv.Job:
    """Return the job; with labels among its fields a model of Hugging Face returns its loss itself."""
    train, val = load_pieces(64, 16) if tiny else load_pieces(16 * 600, 512)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2} if tiny else {"n_embd": 64, "n_layer": 4, "n_head": 4}
    config = GPT2Config(
        vocab_size=256,  # a token is a byte
        n_positions=LENGTH,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **sizes,
    )
    torch.manual_seed(0)
    return rv.Job(
        GPT2LMHeadModel(config),
        {"input_ids": train, "labels": train},
        val_data={"input_ids": val, "labels": val},
        batch_size=16,
        name="gpt2",
    )


if __name__ == "__main__":
    gpt2 = job()
    with rv.local(nodes=3) as hub:
        result = hub.fit(gpt2)
    result.load_into(gpt2.model)
    prompt = torch.tensor([list(b"    def ")])
    written = gpt2.model.eval().generate(prompt, max_length=LENGTH, do_sample=True, temperature=0.7)
    print(bytes(written[0].tolist()).decode(errors="replace"))  # noqa: T201
