"""When an environment gives only groups that training cannot use."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.base.errors import InvalidGroupsError
from lachesis.supervision.invalid_groups import (
    DeadEnvironment,
    count_invalid_groups,
    is_dead,
    require_usable_groups,
)

SIZES: dict[str, int] = {"group_size": 4, "batch_size": 8}
"""Two groups make a batch, six make three."""


@pytest.mark.parametrize(
    ("counts", "dead"),
    [
        (None, False),
        ({}, False),
        ({"failed_groups": 5}, False),
        ({"failed_groups": 6}, True),
        ({"invalid_rollouts": 24}, True),
        ({"invalid_rollouts": 23}, False),
        ({"failed_groups": 3, "invalid_rollouts": 12}, True),
        ({"failed_groups": 600, "rollouts": 1}, False),
        ({"failed_groups": 600, "empty_groups": 1}, False),
        ({"failed_groups": 60, "failed_requests": 60, "lost_requests": 60}, False),
        ({"failed_groups": 60, "failed_requests": 600, "lost_requests": 600}, False),
        ({"failed_groups": 66, "failed_requests": 60, "lost_requests": 60}, True),
        ({"failed_groups": 60, "failed_requests": 600}, True),
        ({"failed_groups": 60, "failed_requests": 600, "lost_requests": 54}, True),
    ],
)
def test_three_batches_of_invalid_groups_are_enough(counts, dead):
    assert is_dead(counts, **SIZES) is dead


@given(
    raised=st.integers(0, 1000),
    invalid=st.integers(0, 4000),
    lost=st.integers(0, 1000),
    usable=st.integers(0, 3),
    empty=st.integers(0, 3),
    group_size=st.integers(2, 16),
)
def test_no_environment_is_dead_that_gave_a_usable_group(
    raised, invalid, lost, usable, empty, group_size
):
    counts = {"failed_groups": raised, "invalid_rollouts": invalid, "lost_requests": lost}
    counts |= {"rollouts": usable, "empty_groups": empty}
    groups = count_invalid_groups(counts, group_size)
    assert 0 <= groups <= raised + invalid // group_size
    if usable or empty or lost >= raised + invalid:
        assert groups == 0


def dead(name, reasons):
    return DeadEnvironment(
        name, f"{name}.py", f"environment-{name}", Path(f"env_{name}.log"), 6, reasons
    )


def test_the_error_names_count_reason_and_next_step():
    raising = dead("sums", {"KeyError: 'answer' (sums.py:12)": 20, "ValueError: x": 4})
    with pytest.raises(InvalidGroupsError) as caught:
        require_usable_groups([raising], 1)
    assert str(caught.value) == (
        "all of the first 6 groups of sums were invalid, most often by: KeyError: 'answer' "
        "(sums.py:12) (20 times); "
        "`lachesis env check sums.py` runs it without training, and its log is env_sums.log"
    )
    assert caught.value.code == "invalid_groups"


def test_a_run_goes_on_while_one_environment_is_not_dead():
    one, other = dead("one", {"KeyError: 'a'": 24}), dead("other", {})
    require_usable_groups([], 1)
    require_usable_groups([one], 2)
    with pytest.raises(
        InvalidGroupsError,
        match=r"groups of one were invalid, .*; all of the first 6 groups of other were",
    ):
        require_usable_groups([one, other], 2)
