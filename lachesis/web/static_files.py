"""Serve styles and scripts under an address that changes with their content."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from lachesis.web.templates import STATIC_FOLDER

ONE_YEAR = "public, max-age=31536000, immutable"


@functools.cache
def get_static_prefix() -> str:
    """Return the path of the files, with a hash of all of them: a browser may keep them."""
    digest = hashlib.sha256()
    for file in sorted(STATIC_FOLDER.rglob("*")):
        if file.is_file():
            digest.update(file.read_bytes())
    return f"/static/{digest.hexdigest()[:12]}"


class KeptStaticFiles(StaticFiles):
    """Serve the files with the permission to keep them."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        """Return the answer for one file."""
        response = super().file_response(*args, **options)
        response.headers["Cache-Control"] = ONE_YEAR
        return response


def make_static_app() -> KeptStaticFiles:
    """Return the application that serves the files."""
    return KeptStaticFiles(directory=STATIC_FOLDER)
