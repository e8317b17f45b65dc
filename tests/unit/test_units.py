"""Quantities: every spelling reads to its base unit, every wrong one says how to write it."""

import math

import pytest

from ravnest.errors import ConfigError
from ravnest.units import (
    Dimension,
    parse_quantity,
    show_bytes,
    show_flops,
    show_rate,
    show_seconds,
    show_value,
)


@pytest.mark.parametrize(
    ("text", "dimension", "expected"),
    [
        ("8 GB", Dimension.BYTES, 8e9),
        ("8GB", Dimension.BYTES, 8e9),
        ("  1.5 kB ", Dimension.BYTES, 1500),
        (".5 KB", Dimension.BYTES, 500),
        ("2 GiB", Dimension.BYTES, 2 * 2**30),
        ("16 Mbit", Dimension.BYTES, 2e6),
        ("7", Dimension.BYTES, 7),
        ("3 G", Dimension.BYTES, 3e9),
        ("-1 B", Dimension.BYTES, -1),
        ("1e3 MB", Dimension.BYTES, 1e9),
        ("1 PB", Dimension.BYTES, 1e15),
        ("1 KiB", Dimension.BYTES, 1024),
        ("1 MiB", Dimension.BYTES, 1024**2),
        ("1 TiB", Dimension.BYTES, 1024**4),
        ("50 Mbit/s", Dimension.BYTES_PER_SECOND, 6.25e6),
        ("50 Mbps", Dimension.BYTES_PER_SECOND, 6.25e6),
        ("6 MB/s", Dimension.BYTES_PER_SECOND, 6e6),
        ("20 TFLOP/s", Dimension.FLOPS_PER_SECOND, 20e12),
        ("20 TFLOPS", Dimension.FLOPS_PER_SECOND, 20e12),
        ("20 TFLOP", Dimension.FLOPS_PER_SECOND, 20e12),
        ("3 GFLOP", Dimension.FLOPS, 3e9),
        ("200 us", Dimension.SECONDS, 2e-4),
        ("12 ms", Dimension.SECONDS, 0.012),
        ("5 min", Dimension.SECONDS, 300),
        ("6 h", Dimension.SECONDS, 21600),
        ("6 hours", Dimension.SECONDS, 21600),
        ("1 hour", Dimension.SECONDS, 3600),
        ("5 s", Dimension.SECONDS, 5),
        ("5 m", Dimension.SECONDS, 300),
        ("1 day", Dimension.SECONDS, 86400),
        ("2 days", Dimension.SECONDS, 172800),
        ("2 d", Dimension.SECONDS, 172800),
    ],
)
def test_reads_what_people_write(text, dimension, expected):
    assert math.isclose(parse_quantity(text, dimension), expected, rel_tol=1e-12)


@pytest.mark.parametrize("dimension", list(Dimension))
def test_every_example_in_an_error_reads(dimension):
    assert parse_quantity(dimension.value, dimension) > 0


@pytest.mark.parametrize(
    ("text", "dimension"),
    [
        ("", Dimension.BYTES),
        ("many", Dimension.BYTES),
        ("8 gb", Dimension.BYTES),
        ("8 GB/s", Dimension.BYTES),
        ("8 G B", Dimension.BYTES),
        ("nan GB", Dimension.BYTES),
        ("1e999 B", Dimension.BYTES),
        ("1e305 TB", Dimension.BYTES),
        ("50", Dimension.BYTES_PER_SECOND),
        ("50 Mb/s", Dimension.BYTES_PER_SECOND),
        ("20 GHz", Dimension.FLOPS_PER_SECOND),
        ("20 TFLOP/s", Dimension.FLOPS),
        ("12", Dimension.SECONDS),
        ("12 kms", Dimension.SECONDS),
    ],
)
def test_refusal_shows_the_text_and_an_example(text, dimension):
    with pytest.raises(ConfigError) as error:
        parse_quantity(text, dimension)
    assert repr(text) in str(error.value)
    assert repr(dimension.value) in str(error.value)


def test_refusal_tells_a_missing_unit_from_an_unknown_one():
    with pytest.raises(ConfigError, match="'12' has no unit"):
        parse_quantity("12", Dimension.SECONDS)
    with pytest.raises(ConfigError, match="unknown unit 'GHz' in '8 GHz'"):
        parse_quantity("8 GHz", Dimension.BYTES)


def test_a_very_long_text_is_refused_at_once_and_quoted_short():
    with pytest.raises(ConfigError) as error:
        parse_quantity("1" + " x" * 1_000_000, Dimension.BYTES)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (show_bytes(0), "0 B"),
        (show_bytes(512e6), "512 MB"),
        (show_bytes(14.23e9), "14.2 GB"),
        (show_bytes(999.6), "1 kB"),
        (show_bytes(123_456e15), "123456 PB"),
        (show_rate(5.5e6), "44 Mbit/s"),
        (show_flops(16e12), "16 TFLOP/s"),
        (show_seconds(0.0002), "0.2 ms"),
        (show_seconds(0.012), "12 ms"),
        (show_seconds(0.9996), "1 s"),
        (show_seconds(1.84), "1.84 s"),
        (show_seconds(119.96), "120 s"),
        (show_seconds(120), "2 min"),
        (show_seconds(390), "6.5 min"),
        (show_seconds(9000), "2.5 h"),
        (show_seconds(3 * 86400), "3 days"),
        (show_seconds(86400 * 1000), "1000 days"),
    ],
)
def test_shows_three_digits_without_exponents(shown, expected):
    assert shown == expected


@pytest.mark.parametrize("value", ["x" * 10_000, [16**5000], {"a": [[[[[[[1]]]]]]]}, list(range(10**5))])
def test_quoted_values_stay_short_whatever_they_are(value):
    assert 0 < len(show_value(value)) < 120
