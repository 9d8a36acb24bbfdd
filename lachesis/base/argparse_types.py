"""Check numbers of the command line, as types of `argparse`."""

import argparse
from collections.abc import Callable

from lachesis.base.errors import shorten

MAX_PORT = 65_535
# The largest whole number that JSON and JavaScript hold exactly.
MAX_SEED = 2**53 - 1


def make_integer_type(low: int, high: int) -> Callable[[str], int]:
    """Return a function that reads a whole number from `low` to `high`."""

    def read_integer(text: str) -> int:
        """Return the whole number of a text, or raise ArgumentTypeError with the allowed bounds."""
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"{shorten(repr(text), 60)}; allowed: a whole number from {low} to {high}"
            )
        return value

    return read_integer


PORT = make_integer_type(1, MAX_PORT)
SEED = make_integer_type(0, MAX_SEED)
NUM_STEPS = make_integer_type(1, 10_000_000)
NUM_LINES = make_integer_type(1, 1_000_000)
NUM_GROUPS = make_integer_type(1, 10_000)
NUM_ROLLOUTS = make_integer_type(1, 1000)
NUM_RUNS = make_integer_type(1, 100_000)
NUM_TOKENS = make_integer_type(1, 1_000_000)
LORA_RANK = make_integer_type(1, 512)
GROUP_SIZE = make_integer_type(1, 1024)


def read_temperature(text: str) -> float:
    """Read a sampling temperature from 0 to 10."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 10:
        raise argparse.ArgumentTypeError(
            f"{shorten(repr(text), 60)}; allowed: a number from 0 to 10"
        )
    return value


TEMPERATURE = read_temperature
