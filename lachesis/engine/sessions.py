"""Keep the sessions of clients, in the same way for every engine."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

# A session without a heartbeat (every 10 s) for this long is ended, and its memory is freed.
SESSION_EXPIRY_S = 900.0


@dataclass
class EngineSession:
    """Hold the state of one client process."""

    session_id: str
    metadata: dict[str, str]
    last_seen: float = field(default_factory=time.monotonic)
    model_ids: list[str] = field(default_factory=list)
    sampler_ids: list[str] = field(default_factory=list)


class SessionKeeper:
    """Start sessions, and find those whose clients are gone."""

    def __init__(self) -> None:
        self.sessions: dict[str, EngineSession] = {}

    def create_session(self, metadata: dict[str, Any] | None) -> str:
        """Start a session and return its id."""
        session = EngineSession(
            uuid.uuid4().hex[:12], {key: str(value) for key, value in (metadata or {}).items()}
        )
        self.sessions[session.session_id] = session
        return session.session_id

    def record_heartbeat(self, session_id: str) -> bool:
        """Note a heartbeat and return whether the session exists."""
        session = self.sessions.get(session_id)
        if session:
            session.last_seen = time.monotonic()
        return session is not None

    def find_expired_sessions(self) -> list[str]:
        """Return the ids of sessions whose last heartbeat is too old."""
        horizon = time.monotonic() - SESSION_EXPIRY_S
        # A copy: another thread ends sessions while this runs.
        return [
            session.session_id
            for session in list(self.sessions.values())
            if session.last_seen < horizon
        ]

    def remove_from_sessions(self, model_id: str) -> None:
        """Note that a model in training is gone."""
        for session in list(self.sessions.values()):
            if model_id in session.model_ids:
                session.model_ids.remove(model_id)
