"""Rehearse the paid path without a key: `make rehearsal`, or `python -m tests.tinker_cloud`.

It makes the stand-ins, trains one of them on the format of an environment's answers, starts the
rehearsal cloud, and prints the variables with which `lachesis` takes it for the Tinker cloud.
"""

import argparse
import signal
import threading
from pathlib import Path

from lachesis.environment_catalog.lookup import collect_examples, find_environment
from tests.tinker_cloud.running import KEY, serve_cloud
from tests.tinker_cloud.stand_ins import STAND_INS, ensure_stand_in, make_recipe

NUM_EXAMPLES = 4000


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m tests.tinker_cloud", description=__doc__)
    parser.add_argument("--environment", default="countdown")
    parser.add_argument("--model", default="Qwen/Qwen3-4B-Instruct-2507", choices=list(STAND_INS))
    parser.add_argument("--steps", type=int, default=900, help="steps of training the stand-in")
    parser.add_argument("--folder", type=Path, default=Path(".home/rehearsal"))
    parser.add_argument("--port", type=int)
    args = parser.parse_args()
    folder = args.folder.resolve()
    environment = find_environment(args.environment)
    conversations = collect_examples(environment, {}, count=NUM_EXAMPLES, share=0.3)
    for name in STAND_INS:
        if name == args.model:
            print(f"training the stand-in of {name} on {args.environment}, once", flush=True)
            recipe = make_recipe(conversations, args.steps)
            ensure_stand_in(name, folder / "hf", conversations, recipe)
        else:
            ensure_stand_in(name, folder / "hf")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with serve_cloud(folder, port=args.port) as cloud:
        print(
            "The rehearsal cloud is ready. In another terminal:\n\n"
            f"  export TINKER_BASE_URL={cloud.url} TINKER_API_KEY={KEY}\n"
            f"  export HF_HOME={folder / 'hf'} HF_HUB_OFFLINE=1\n\n"
            f"What was used: {cloud.url}/control/bill. Ctrl-C ends it.",
            flush=True,
        )
        stop.wait()


if __name__ == "__main__":
    main()
