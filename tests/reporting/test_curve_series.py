"""Curves: means over steps, fewer points whose peaks stay, and the end of a curve that goes on."""

import numpy as np
import pytest

from lachesis.reporting.charts import choose_charts, list_metrics
from lachesis.reporting.run_curves import (
    CurveRequest,
    RunCurves,
    average_around,
    choose_points,
    to_numbers,
)

NAME = "reward/mean"


def make_steps(values, first=1):
    return [
        {"step": step, NAME: value, "time/step": 2.0, "tokens/trained_total": 10 * step}
        for step, value in enumerate(values, first)
    ]


def test_a_mean_is_taken_around_each_step():
    values = np.array([1.0, 2.0, 6.0, 3.0, np.nan, 5.0])
    means = average_around(values, np.arange(1, 7), 3)
    assert means == pytest.approx([1.5, 3.0, 11 / 3, 4.5, 4.0, 5.0])
    assert average_around(values, np.arange(1, 7), 1) is values


def test_a_mean_does_not_reach_across_missing_steps():
    values = np.array([1.0, 1.0, 9.0, 9.0])
    assert average_around(values, np.array([1, 2, 7, 8]), 45).tolist() == [1.0, 1.0, 9.0, 9.0]


@pytest.mark.parametrize("width", [5, 15, 45])
def test_a_mean_is_that_of_a_plain_loop(width):
    values = np.random.default_rng(0).normal(size=200)
    half = width // 2
    expected = [values[max(0, i - half) : i + half + 1].mean() for i in range(200)]
    assert average_around(values, np.arange(200), width) == pytest.approx(expected)


def test_peaks_stay_where_points_are_left_out():
    values = np.zeros(10_000)
    values[[17, 5003, 9998]] = 1.0, -3.0, 2.0
    chosen = choose_points(np.arange(10_000.0), values, 200)
    assert len(chosen) <= 200
    assert {0, 17, 5003, 9998, 9999} <= set(chosen.tolist())
    assert choose_points(np.arange(5.0), np.zeros(5), 200).tolist() == [0, 1, 2, 3, 4]


def test_a_part_has_its_neighbours_and_means_of_the_whole():
    curves = RunCurves(make_steps([float(step) for step in range(1, 101)]))
    request = CurveRequest(mean_width=5, first=50, last=52)
    series = curves.make_series(NAME, request)
    assert series == {"x": [49, 50, 51, 52, 53], "raw": [49, 50, 51, 52, 53],
                      "mean": [49, 50, 51, 52, 53]}  # fmt: skip
    assert curves.make_series("missing", request) is None
    assert curves.make_series(NAME, CurveRequest(first=500)) == {"x": [], "raw": [], "mean": []}


def test_places_on_each_axis():
    curves = RunCurves(make_steps([0.0, 0.5, 1.0]))
    assert curves.locate(2, "step") == 2
    assert curves.locate(2, "tokens") == 20
    assert curves.locate(0, "time") == 0
    assert curves.locate(9, "time") == 6
    assert RunCurves([]).locate(3, "tokens") == 3


def test_numbers_are_short_and_finite():
    numbers = to_numbers(np.array([1 / 3, np.nan, np.inf, 123456.789, -1e-9]))
    assert numbers == [0.33333, None, None, 123460.0, -1e-9]


def test_charts_that_show_nothing_are_left_out():
    steps = [
        {"step": step, "time": 1.0, NAME: step / 9, "train/learning_rate": 0.001,
         "entropy/sampling": 1 / step, "optim/grad_norm": None}
        for step in range(1, 5)
    ]  # fmt: skip
    charts = choose_charts(steps)
    assert charts.main is not None
    assert [chart.name for chart in charts.small] == ["entropy"]
    assert charts.flat == ["learning rate 0.001"]
    assert NAME in list_metrics(steps)
    assert choose_charts([]).main is None
