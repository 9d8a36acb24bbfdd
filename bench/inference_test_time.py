"""Measure how long a validation takes.

It is timed without keys, from its submission, and at an endpoint, with three models at once and
with one alone. The endpoint is a local server that delays each answer as a distant one would.

    python bench/inference_test_time.py [--repeat 3]
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from table import show

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
TARGET_S, TARGET_RATIO = 25.0, 1.3
LATENCY_S, GROUPS = 2.0, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    from lachesis.tiny_model import build
    from tests.harness.openai_endpoint import serving

    with (
        tempfile.TemporaryDirectory(prefix="lachesis-bench-") as home,
        serving(LATENCY_S) as endpoint,
    ):
        os.environ.update(
            LACHESIS_HOME=home, OPENAI_BASE_URL=endpoint.url, OPENAI_API_KEY=endpoint.key
        )
        build.ensure_tiny_model(build.TinyModelRecipe())
        from lachesis.prefect_client.background_serve import LauncherProcess

        with LauncherProcess():
            keyless = [time_test()[0] for _ in range(args.repeat)]
            alone, together = [], []
            for turn in range(args.repeat):
                alone.append(max(time_test(models=[f"one/{turn}"], steps=GROUPS)[1].values()))
                names = [f"{name}/{turn}" for name in ("a", "b", "c")]
                together.append(max(time_test(models=names, steps=GROUPS)[1].values()))
    one_s, three_s = statistics.median(alone), statistics.median(together)
    rows: list[list[object]] = [
        [
            "arithmetic without keys, submit to verdict (s)",
            f"{statistics.median(keyless):.1f}",
            f"{TARGET_S:.0f}",
            "",
        ],
        [f"one model, {GROUPS} groups at {LATENCY_S:g} s an answer (s)", f"{one_s:.1f}", "", ""],
        [
            "three models at once (s)",
            f"{three_s:.1f}",
            f"{TARGET_RATIO * one_s:.1f}",
            f"{three_s / one_s:.2f}",
        ],
    ]
    show("validation", ["what (median)", "measured", "target", "ratio to one model"], rows)


def time_test(**options: object) -> tuple[float, dict[str, float]]:
    """Seconds from the submission to the result, and of each model's inference."""
    from lachesis.config.launch_spec import TestSpec
    from lachesis.operations.inference_tests import get_test, start_test
    from lachesis.runs.store import RunStore

    store, started = RunStore(), time.monotonic()
    test = start_test(store, TestSpec.model_validate({"environment": "arithmetic", **options}))
    while (test := get_test(store, test.test_id)).status not in ("completed", "failed"):
        time.sleep(0.1)
    assert test.status == "completed", test
    durations = {
        stage.name: stage.seconds for stage in test.stages if stage.name.startswith("inference")
    }
    return time.monotonic() - started, durations


if __name__ == "__main__":
    main()
