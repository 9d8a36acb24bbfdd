"""The key of an endpoint stays in the child that needs it."""

from __future__ import annotations

from pathlib import Path

from tasks import inference


def test_a_key_that_was_echoed_is_taken_out_of_log_and_message(tmp_path: Path) -> None:
    log = tmp_path / "model.log"
    log.write_bytes(b"401: Incorrect API key provided: Bearer sk-secret-1\n\xff")
    inference._scrub(log, "sk-secret-1")
    assert log.read_bytes() == b"401: Incorrect API key provided: Bearer ***\n\xff"
    assert inference._without("sk-secret-1", "refused: sk-secret-1") == "refused: ***"
    assert inference._without("", "nothing to take out") == "nothing to take out"
