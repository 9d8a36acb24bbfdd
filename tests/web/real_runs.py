"""Four recorded trainings of the tiny model on sums, of 100 steps each, in a home of their own.

`recorded_runs.tar.xz` holds what the trainings wrote, without weights. Three differ in the learning
rate and the group size; in the fourth the verifier raises for sums of two digits from about step 46
on.
"""

import tarfile
from pathlib import Path

from lachesis.runs.store import RunStore

ARCHIVE = Path(__file__).with_name("recorded_runs.tar.xz")
GOOD, SLOW, SMALL_GROUPS, BROKEN = "3d4f50a1", "1bd8635c", "46a8ef30", "d7f9623f"


def unpack_runs(home: Path, model: Path | None = None) -> RunStore:
    """Return the recorded runs in this home.

    Args:
        home: Where they are unpacked.
        model: A folder with the tokenizer of their model, where answers are shown by tokens.
    """
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(home, filter="data")
    store = RunStore(home)
    if model is not None:
        for run_id in (GOOD, SLOW, SMALL_GROUPS, BROKEN):
            store.update(run_id, base_model=str(model))
    return store
