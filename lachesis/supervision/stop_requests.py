"""Find out whether a run should end.

Whoever starts the supervision says how the world outside is asked: `ask_stop` raises
`StopRequested`. Without a server, a stop is the file `stop` in the run's folder. Its existence is
asked for, and nothing is parsed.
"""

import time
from collections.abc import Callable

from lachesis.runs.end_causes import CAUSES, EndCause
from lachesis.runs.store import RunStore

CHECK_INTERVAL_S = 3.0


class StopRequested(Exception):
    """The run should end, with a checkpoint, as somebody has asked; this is no failure.

    Args:
        cause: Why.
        sentence: The cause with what was seen of it.
    """

    def __init__(self, cause: EndCause, sentence: str | None = None) -> None:
        super().__init__(sentence or CAUSES[cause].sentence)
        self.cause, self.sentence = cause, str(self)


class StopCheck:
    """Say whether one attempt of a run should end.

    Args:
        store: The runs of this home.
        run_id: The run.
        ask_stop: Raises `StopRequested` if the run should end, and any other error if the attempt
            has failed already. It may take a while.
    """

    def __init__(self, store: RunStore, run_id: str, ask_stop: Callable[[], None]) -> None:
        self.store, self.run_id, self.ask_stop = store, run_id, ask_stop
        self._checked_at = time.monotonic()

    def check(self) -> None:
        """Raise StopRequested if the run should end; after that no service may start."""
        self._checked_at = time.monotonic()
        self.store.dir(self.run_id).show_life()
        if self.store.dir(self.run_id).stop_file.exists():
            record = self.store.load(self.run_id)
            raise StopRequested(record.stop_cause or EndCause.PERSON, record.stop_reason)
        self.ask_stop()

    def check_now_and_then(self) -> None:
        """Check if the last check was some seconds ago; this may be called often."""
        if time.monotonic() - self._checked_at > CHECK_INTERVAL_S:
            self.check()
