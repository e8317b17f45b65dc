"""Text and tokens: bytes, two functions, a tokenizer; a letter is told when it is complete."""

import pytest

from ravnest.errors import ConfigError
from ravnest.requester.text_codec import TextStream, find_codec


def test_bytes_are_tokens_where_there_are_as_many_words():
    codec = find_codec(None, None, 256)
    assert codec.encode_checked("aé", 256) == [97, 195, 169]
    stream = TextStream(codec.decode)
    assert [stream.add(token) for token in (97, 195, 169)] == ["a", "", "é"]
    assert (stream.add(195), stream.end(), stream.end(), stream.text) == ("", "\ufffd", "", "aé\ufffd")
    with pytest.raises(ConfigError, match=r"has 5000 words, and the job no tokenizer; give tokenizer="):
        find_codec(None, None, 5000)


def test_two_functions_will_do_and_tokens_are_taken_as_they_are():
    codec = find_codec((lambda text: map(int, text.split()), str), None, 10)
    assert codec.encode_checked("1 2", 10) == codec.encode_checked([1, 2], 10) == [1, 2]
    with pytest.raises(ConfigError, match=r"the prompt has token 12, and the model has 10 words"):
        codec.encode_checked([12], 10)
    with pytest.raises(ConfigError, match=r"the prompt is empty"):
        codec.encode_checked("", 10)
    with pytest.raises(ConfigError, match=r"no tokenizer with a chat template"):
        codec.encode_checked("1", 10, is_chat=True)


@pytest.mark.parametrize("given", ["gpt2", 7, (print,), {"encode": print}])
def test_what_is_no_tokenizer_is_told(given):
    with pytest.raises(
        ConfigError, match=r"tokenizer is .*; give a tokenizer of transformers, or two functions"
    ):
        find_codec(given, None, 10)
