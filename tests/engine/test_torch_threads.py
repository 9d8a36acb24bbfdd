"""How many threads are taken, given what passes take."""

import pytest
import torch

from lachesis.engine.base_model import torch_threads
from lachesis.engine.base_model.forward_pass import BaseLanguageModel


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({1: 1.0, 2: 0.6, 4: 0.4}, 4),
        ({1: 1.0, 2: 0.6, 4: 0.59}, 2),
        ({1: 1.0, 2: 1.3, 4: 2.0}, 1),
        ({1: 1.0, 2: 0.97, 4: 0.5}, 4),
    ],
)
def test_the_number_that_pays_is_taken(random_model, monkeypatch, times, expected):
    now = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: now[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: now.__setitem__(0, count))
    monkeypatch.setattr(torch_threads, "_measure_pass_s", lambda base: times[now[0]])
    assert torch_threads.tune_num_threads(BaseLanguageModel(random_model)) == expected
    assert now == [expected]
