"""A stand-in for the Hugging Face Hub that speaks its real protocol, and can misbehave on command.

It takes commits of small files and of files over Git LFS, and serves what it has to the libraries
that load models. `refuse(part, status, times)` answers requests whose path contains `part` so.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN, USER = "hf_" + "stand" * 7, "me"
COMMIT = "0" * 40


@dataclass
class Repository:
    private: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)


class ModelHub(http.server.ThreadingHTTPServer):
    """Hold repositories by OWNER/NAME; only `me` and `team` may be written by the token."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.uploads: list[str] = []
        self.refusals: list[list[Any]] = []
        self.lock = threading.Lock()

    def refuse(self, part: str, status: int, times: int = 10**6) -> None:
        self.refusals.append([part, status, times])

    def choose_refusal(self, path: str) -> int | None:
        with self.lock:
            for refusal in self.refusals:
                if refusal[0] in path and refusal[2] > 0:
                    refusal[2] -= 1
                    return int(refusal[1])
        return None


@contextlib.contextmanager
def serve_hub() -> Iterator[ModelHub]:
    hub = ModelHub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    yield hub
    hub.shutdown()
    hub.server_close()


class HubHandler(http.server.BaseHTTPRequestHandler):
    server: ModelHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(self._read)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        self._answer(self._put_object)

    def do_POST(self) -> None:
        self._answer(self._post)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, handle: Any) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length)
        self.place = unquote(urlsplit(self.path).path)
        status = self.server.choose_refusal(self.place)
        if status is not None:
            self._send(status, {"error": f"refused with {status}"})
            return
        handle()

    def _is_signed_in(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _find_repository(self, name: str) -> Repository | None:
        repository = self.server.repositories.get(name)
        if repository is not None and repository.private and not self._is_signed_in():
            return None
        return repository

    # --- reading

    def _read(self) -> None:
        if self.place == "/api/whoami-v2":
            if self._is_signed_in():
                self._send(200, {"type": "user", "name": USER, "orgs": [{"name": "team"}]})
            else:
                self._send(401, {"error": "Invalid username or password."})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/[^/]+)?", self.place):
            self._send_info(match[1])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", self.place):
            self._send_file(match[1], match[2])
        else:
            self._send_missing("EntryNotFound")

    def _send_info(self, name: str) -> None:
        repository = self._find_repository(name)
        if repository is None:
            self._send_missing("RepoNotFound")
            return
        siblings = [{"rfilename": file} for file in repository.files]
        info = {"_id": "1", "id": name, "modelId": name, "sha": COMMIT, "siblings": siblings}
        self._send(200, {**info, "private": repository.private, "tags": [], "downloads": 0})

    def _send_file(self, name: str, file: str) -> None:
        repository = self._find_repository(name)
        if repository is None:
            self._send_missing("RepoNotFound")
        elif file not in repository.files:
            self._send_missing("EntryNotFound")
        else:
            content = repository.files[file]
            etag = f'"{hashlib.sha256(content).hexdigest()}"'
            self._send(200, content, {"ETag": etag, "X-Repo-Commit": COMMIT})

    # --- writing

    def _post(self) -> None:
        if not self._is_signed_in():
            self._send(401, {"error": "Invalid username or password."})
        elif self.place == "/api/repos/create":
            self._create_repository(json.loads(self.body))
        elif self.place == "/api/validate-yaml":
            self._validate_card(json.loads(self.body)["content"])
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", self.place):
            files = json.loads(self.body)["files"]
            self._send(200, {"files": [self._choose_mode(file) for file in files]})
        elif match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", self.place):
            self._offer_upload(json.loads(self.body))
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", self.place):
            self._commit(match[1], [json.loads(line) for line in self.body.splitlines()])
        else:
            self._send_missing("EntryNotFound")

    def _create_repository(self, request: Any) -> None:
        name = f"{request['organization'] or USER}/{request['name']}"
        if name.split("/")[0] not in (USER, "team"):
            self._send(403, {"error": f"You don't have the rights to create {name}"})
        elif name in self.server.repositories:
            self._send(
                409, {"error": "You already created this", "url": f"{self.server.url}/{name}"}
            )
        else:
            self.server.repositories[name] = Repository(request.get("visibility") == "private")
            self._send(200, {"url": f"{self.server.url}/{name}", "name": name, "id": "1"})

    def _validate_card(self, content: str) -> None:
        base_model = re.search(r"^base_model: (.*)$", content, re.MULTILINE)
        if base_model and not re.fullmatch(r"[\w.-]+/[\w.-]+", base_model[1]):
            message = '"base_model" must be an id of the Hub'
            self._send(400, {"errors": [{"message": message}], "warnings": []})
        else:
            self._send(200, {"errors": [], "warnings": []})

    def _choose_mode(self, file: Any) -> Any:
        mode = "lfs" if file["path"].endswith(".safetensors") else "regular"
        return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": None}

    def _offer_upload(self, request: Any) -> None:
        objects = []
        for entry in request["objects"]:
            action = {"upload": {"href": f"{self.server.url}/objects/{entry['oid']}"}}
            is_stored = entry["oid"] in self.server.objects
            objects.append({**entry, **({} if is_stored else {"actions": action})})
        self._send(200, {"transfer": "basic", "objects": objects})

    def _put_object(self) -> None:
        oid = self.place.rpartition("/")[2]
        self.server.uploads.append(oid)
        if hashlib.sha256(self.body).hexdigest() != oid:
            self._send(422, {"error": "the content has another hash"})
            return
        self.server.objects[oid] = self.body
        self._send(200, b"")

    def _commit(self, name: str, lines: list[Any]) -> None:
        files = {}
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
        repository = self.server.repositories[name]
        repository.files |= files
        repository.commits.append(lines[0]["value"]["summary"])
        self._send(200, {"commitUrl": f"{self.server.url}/{name}/commit/1", "commitOid": COMMIT})

    # --- answers

    def _send_missing(self, code: str) -> None:
        self._send(404, {"error": code}, {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
