"""The base of all typed answers of commands, tools and routes."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from lachesis.base.json_text import Json


class ResponseModel(BaseModel):
    """A typed answer. What is not known is absent from its JSON; null says that there is no
    value.
    """

    model_config = ConfigDict(use_attribute_docstrings=True, protected_namespaces=())

    def to_payload(self) -> Json:
        """Return the answer as plain JSON."""
        return self.model_dump(mode="json", exclude_unset=True)
