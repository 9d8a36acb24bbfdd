"""A stand-in for the Hugging Face Hub that speaks its real protocol, and can misbehave on command.

It takes commits of small files and of files over Git LFS, and serves what it has to the libraries
that load models. `refuse(part, status, times)` answers requests whose path contains `part` so.
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.harness.http_answers import Reply, Request, serve_answers

TOKEN, USER = "hf_" + "stand" * 7, "me"
COMMIT = "0" * 40
UNKNOWN_TOKEN = Reply(401, {"error": "Invalid username or password."})


@dataclass
class Repository:
    private: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)


class ModelHub:
    """Hold repositories by OWNER/NAME; only `me` and `team` may be written by the token."""

    def __init__(self) -> None:
        self.url = ""
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.uploads: list[str] = []
        self.refusals: list[list[Any]] = []
        self.lock = threading.Lock()

    def refuse(self, part: str, status: int, times: int = 10**6) -> None:
        """Answer requests whose path contains `part` with this status."""
        self.refusals.append([part, status, times])

    def choose_refusal(self, path: str) -> int | None:
        """Return the status with which a request is refused, or None."""
        with self.lock:
            for refusal in self.refusals:
                if refusal[0] in path and refusal[2] > 0:
                    refusal[2] -= 1
                    return int(refusal[1])
        return None

    def answer(self, request: Request) -> Reply:
        """Return what a client gets."""
        place = unquote(urlsplit(request.path).path)
        if (status := self.choose_refusal(place)) is not None:
            return Reply(status, {"error": f"refused with {status}"})
        is_signed_in = request.headers.get("Authorization") == f"Bearer {TOKEN}"
        if request.method == "PUT":
            return self._put_object(place, request.body)
        if request.method == "POST":
            return self._post(place, request) if is_signed_in else UNKNOWN_TOKEN
        return self._read(place, is_signed_in=is_signed_in)

    # --- reading

    def _read(self, place: str, *, is_signed_in: bool) -> Reply:
        if place == "/api/whoami-v2":
            user = {"type": "user", "name": USER, "orgs": [{"name": "team"}]}
            return Reply(content=user) if is_signed_in else UNKNOWN_TOKEN
        match = re.fullmatch(
            r"/(?:api/models/)?([^/]+/[^/]+)(?:/revision/[^/]+|/resolve/[^/]+/(.+))?", place
        )
        if match is None:
            return refuse_missing("EntryNotFound")
        repository = self.repositories.get(match[1])
        if repository is None or (repository.private and not is_signed_in):
            return refuse_missing("RepoNotFound")
        if match[2] is None:
            return self._describe(match[1], repository)
        if match[2] not in repository.files:
            return refuse_missing("EntryNotFound")
        content = repository.files[match[2]]
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        return Reply(200, content, {"ETag": etag, "X-Repo-Commit": COMMIT})

    def _describe(self, name: str, repository: Repository) -> Reply:
        siblings = [{"rfilename": file} for file in repository.files]
        info = {"_id": "1", "id": name, "modelId": name, "sha": COMMIT, "siblings": siblings}
        return Reply(content={**info, "private": repository.private, "tags": [], "downloads": 0})

    # --- writing

    def _post(self, place: str, request: Request) -> Reply:
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", place):
            return self._commit(match[1], [json.loads(line) for line in request.body.splitlines()])
        content = request.json()
        if place == "/api/repos/create":
            return self._create_repository(content)
        if place == "/api/validate-yaml":
            return validate_card(content["content"])
        if re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", place):
            return Reply(content={"files": [choose_mode(file) for file in content["files"]]})
        if re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", place):
            return self._offer_upload(content)
        return refuse_missing("EntryNotFound")

    def _create_repository(self, request: Any) -> Reply:
        name = f"{request['organization'] or USER}/{request['name']}"
        if name.split("/")[0] not in (USER, "team"):
            return Reply(403, {"error": f"You don't have the rights to create {name}"})
        url = f"{self.url}/{name}"
        if name in self.repositories:
            return Reply(409, {"error": "You already created this", "url": url})
        self.repositories[name] = Repository(request.get("visibility") == "private")
        return Reply(content={"url": url, "name": name, "id": "1"})

    def _offer_upload(self, request: Any) -> Reply:
        objects = []
        for entry in request["objects"]:
            action = {"upload": {"href": f"{self.url}/objects/{entry['oid']}"}}
            is_stored = entry["oid"] in self.objects
            objects.append({**entry, **({} if is_stored else {"actions": action})})
        return Reply(content={"transfer": "basic", "objects": objects})

    def _put_object(self, place: str, body: bytes) -> Reply:
        oid = place.rpartition("/")[2]
        self.uploads.append(oid)
        if hashlib.sha256(body).hexdigest() != oid:
            return Reply(422, {"error": "the content has another hash"})
        self.objects[oid] = body
        return Reply(200, b"")

    def _commit(self, name: str, lines: list[Any]) -> Reply:
        repository = self.repositories[name]
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repository.files[value["path"]] = self.objects[value["oid"]]
        repository.commits.append(lines[0]["value"]["summary"])
        return Reply(content={"commitUrl": f"{self.url}/{name}/commit/1", "commitOid": COMMIT})


def validate_card(content: str) -> Reply:
    """Return whether the Hub takes a card."""
    base_model = re.search(r"^base_model: (.*)$", content, re.MULTILINE)
    if base_model and not re.fullmatch(r"[\w.-]+/[\w.-]+", base_model[1]):
        errors = [{"message": '"base_model" must be an id of the Hub'}]
        return Reply(400, {"errors": errors, "warnings": []})
    return Reply(content={"errors": [], "warnings": []})


def choose_mode(file: Any) -> Any:
    """Return how a file is to be uploaded."""
    mode = "lfs" if file["path"].endswith(".safetensors") else "regular"
    return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": None}


def refuse_missing(code: str) -> Reply:
    """Return the answer for what the Hub does not have."""
    return Reply(404, {"error": code}, {"X-Error-Code": code, "X-Error-Message": code})


@contextlib.contextmanager
def serve_hub() -> Iterator[ModelHub]:
    """Serve a hub within the block."""
    hub = ModelHub()
    with serve_answers(hub.answer, "HTTP/1.1") as hub.url:
        yield hub
