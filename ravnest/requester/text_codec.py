"""Text to tokens and back: by a model's tokenizer, by two functions, or by bytes.

A stream turns tokens into text piece by piece, and waits where a letter is not complete.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ravnest.errors import ConfigError
from ravnest.requester.dataset import show_thing

_HALF_A_LETTER = "\ufffd"  # what a decoder makes of bytes that are no letter yet
_NUM_BYTES = 256
_MOST_BYTE_WORDS = 300  # a vocabulary of bytes may have a few words beside them
_FORMS = "a tokenizer of transformers, or two functions (encode, decode)"


@dataclass(frozen=True, eq=False)
class TextCodec:
    """How text becomes tokens and tokens become text; a token of `ends` ends a text."""

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[list[int]], str]
    ends: frozenset[int] = frozenset()
    tokenizer: Any = None

    def encode_checked(
        self, prompt: str | Sequence[int], num_words: int, *, is_chat: bool = False
    ) -> list[int]:
        """Return the tokens of a prompt, or say what is wrong with it."""
        if is_chat and self.tokenizer is None:
            raise ConfigError("the job has no tokenizer with a chat template; leave is_chat out")
        if isinstance(prompt, str):
            ids = (
                encode_prompt(self.tokenizer, prompt, is_chat=is_chat)
                if self.tokenizer is not None
                else [int(each) for each in self.encode(prompt)]
            )
        else:
            ids = [int(each) for each in prompt]
        if not ids:
            raise ConfigError("the prompt is empty; give some text to go on from")
        strange = next((each for each in ids if not 0 <= each < num_words), None)
        if strange is not None:
            raise ConfigError(f"the prompt has token {strange}, and the model has {num_words} words")
        return ids


class TextStream:
    """The text of tokens that come one by one; each piece is told once."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._text, self._num_told = "", 0

    def add(self, token: int) -> str:
        """Take a token; return what can be told now."""
        self._tokens.append(token)
        self._text = self._decode(self._tokens)
        return "" if self._text.endswith(_HALF_A_LETTER) else self.end()

    def end(self) -> str:
        """Return what was not told yet."""
        piece = self._text[self._num_told :]
        self._num_told = max(self._num_told, len(self._text))
        return piece

    @property
    def text(self) -> str:
        """All of it."""
        return self._text


def find_codec(tokenizer: object, model: object, num_words: int) -> TextCodec:
    """Return how the texts of a job are read and written, or say what is missing."""
    if tokenizer is None:
        if _NUM_BYTES <= num_words <= _MOST_BYTE_WORDS:
            return TextCodec(lambda text: list(text.encode()), _decode_bytes)
        problem = f"the model has {num_words} words, and the job no tokenizer"
        raise ConfigError(f"{problem}; give tokenizer={_FORMS} to the Job")
    check_tokenizer(tokenizer)
    if isinstance(tokenizer, tuple | list):
        encode, decode = tokenizer
        return TextCodec(encode, decode, find_ends(model, None))
    plain: Any = tokenizer
    return TextCodec(plain.encode, plain.decode, find_ends(model, plain), plain)


def check_tokenizer(given: object) -> None:
    """Refuse what is no tokenizer."""
    is_pair = isinstance(given, tuple | list) and len(given) == 2 and all(map(callable, given))
    is_tokenizer = callable(given) and hasattr(given, "encode") and hasattr(given, "decode")
    if given is not None and not is_pair and not is_tokenizer:
        raise ConfigError(f"tokenizer is {show_thing(given)}; give {_FORMS}")


def encode_prompt(tokenizer: Any, prompt: str, *, is_chat: bool) -> list[int]:
    """Return the tokens of a prompt; of what a user says in a chat, by the tokenizer's template."""
    if is_chat:
        if not tokenizer.chat_template:
            raise ConfigError("the model's tokenizer has no chat template; leave --chat out")
        said = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    ids = list(tokenizer(prompt, add_special_tokens=not is_chat, verbose=False)["input_ids"])
    if not ids and tokenizer.bos_token_id is not None:
        ids = [tokenizer.bos_token_id]
    if not ids:
        raise ConfigError("the prompt is empty; give some text to go on from")
    return ids


def find_ends(model: object, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a text, as the model and its tokenizer say."""
    config = getattr(model, "generation_config", None)
    found = getattr(config, "eos_token_id", None)
    ends = set(found) if isinstance(found, list) else {found}
    return frozenset(
        each for each in (*ends, getattr(tokenizer, "eos_token_id", None)) if isinstance(each, int)
    )


def _decode_bytes(tokens: list[int]) -> str:
    return bytes(each for each in tokens if each < _NUM_BYTES).decode(errors="replace")
