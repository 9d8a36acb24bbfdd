"""List the models that an agent's draft could train."""

from __future__ import annotations

from lachesis.agent.session import AgentSession, get_default_profile
from lachesis.orchestration.model_list import ModelList, list_models


def list_session_models(session: AgentSession, profile: str | None) -> ModelList:
    """Return the models of a profile; by default of the draft's, or the default profile."""
    draft = session.session_file.read().draft
    default = draft.profile if draft else get_default_profile()
    return list_models(profile or default, session.service.store.home)
