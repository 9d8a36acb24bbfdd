"""A served home in which runs train on SkyRL, alone or with a second host."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lachesis.prefect_client.serve_info import server_file
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore
from lachesis.supervision.services.ports import reserve_free_ports
from tests.patience import deadline
from tests.served import ROOT, processes_under

# Installed once for all test runs of this checkout; it takes some gigabytes.
BACKENDS_HOME = ROOT / ".backends"
HOSTS = ("lachesis-a", "lachesis-b")
ADDRESSES = ("10.203.17.1", "10.203.17.2")
RAY_PORT = 6379


@dataclass
class Place:
    """A home with a launcher; on a host of its own every command is run there."""

    home: Path
    prefix: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)

    def make_env(self) -> dict[str, str]:
        own = {"LACHESIS_HOME": str(self.home), "LACHESIS_MONITOR_INTERVAL_S": "3600"}
        return {**os.environ, **own, **self.env}

    def run(self, *words: str, expect: int = 0) -> Any:
        """Run `lachesis ... --json` and return its answer."""
        command = [*self.prefix, sys.executable, "-m", "lachesis.cli.main", *words, "--json"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=600, check=False, env=self.make_env()
        )
        assert done.returncode == expect, f"{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout)

    def load(self, run_id: str) -> RunRecord:
        return RunStore(self.home).load(run_id)

    def wait(
        self, run_id: str, is_reached: Callable[[RunRecord], bool], timeout_s: float
    ) -> RunRecord:
        """Wait for something about a run; its end is the last chance."""
        until = deadline(timeout_s)
        while True:
            record = self.load(run_id)
            if is_reached(record):
                return record
            assert not record.has_ended, record.error
            assert time.monotonic() < until, f"{record.status}, {record.phase}"
            time.sleep(0.2)


@pytest.fixture(scope="session")
def skyrl() -> Path:
    """The folder that holds SkyRL's environment, which is made from PyPI's packages."""
    folder = BACKENDS_HOME / "backends"
    if not (folder / "skyrl" / "bin" / "ray").exists():
        command = [sys.executable, "-m", "lachesis.cli.main", "backend", "install", "skyrl"]
        env = {**os.environ, "LACHESIS_HOME": str(BACKENDS_HOME)}
        subprocess.run(command, env=env, check=True, timeout=1200)
    return folder


@contextlib.contextmanager
def serve(place: Place) -> Iterator[Place]:
    """Serve a home, and check at the end that nothing is left of it."""
    port = str(reserve_free_ports(1)[0])
    command = [*place.prefix, sys.executable, "-m", "deployments.serve", "--port", port]
    with (place.home / "launcher.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=place.make_env(),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        until = deadline(120)
        while not server_file(place.home).exists():
            assert process.poll() is None, (place.home / "launcher.log").read_text()
            assert time.monotonic() < until
            time.sleep(0.1)
        yield place
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(600)
    left = processes_under(place.home)
    assert left == {}, left


@pytest.fixture
def make_place(new_home: Callable[[], Path], skyrl: Path) -> Callable[..., Place]:
    """A factory of homes that have the tiny model and SkyRL."""

    def make(prefix: tuple[str, ...] = (), **env: str) -> Place:
        home = new_home()
        (home / "backends").symlink_to(skyrl)
        return Place(home, prefix, {"JAX_PLATFORMS": "cpu", **env})

    return make


# --- two hosts


def run_ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def find_namespace_problem() -> str | None:
    """Return why no network namespace can be made here, or None."""
    if shutil.which("ip") is None:
        return "there is no `ip` (package iproute2)"
    try:
        run_ip("netns", "add", "lachesis-trial")
        run_ip("netns", "del", "lachesis-trial")
    except subprocess.CalledProcessError as error:
        return f"no network namespace can be made: {error.stderr.decode().strip()}"
    return None


@pytest.fixture
def two_hosts() -> Iterator[None]:
    """Two network namespaces that reach each other, each with its own address for its name."""
    if problem := find_namespace_problem():
        pytest.skip(problem)
    name = socket.gethostname()
    _remove_hosts()
    try:
        for host in HOSTS:
            run_ip("netns", "add", host)
            run_ip("-n", host, "link", "set", "lo", "up")
        run_ip("link", "add", "lach-a", "netns", HOSTS[0], "type", "veth", "peer", "name",
               "lach-b", "netns", HOSTS[1])  # fmt: skip
        for host, device, address in zip(HOSTS, ("lach-a", "lach-b"), ADDRESSES, strict=True):
            run_ip("-n", host, "addr", "add", f"{address}/24", "dev", device)
            run_ip("-n", host, "link", "set", device, "up")
            folder = Path("/etc/netns") / host
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {name}\n")
        yield
    finally:
        _remove_hosts()


def _remove_hosts() -> None:
    for host in HOSTS:
        if (Path("/run/netns") / host).exists():
            for pid in list_pids(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            run_ip("netns", "del", host)
        shutil.rmtree(Path("/etc/netns") / host, ignore_errors=True)


def list_pids(host: str) -> list[int]:
    listed = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True)
    return [int(pid) for pid in listed.stdout.split()]


def list_workers(host: str) -> list[str]:
    """Return the names of the processes of a host that Ray has started for somebody."""
    commands = []
    for pid in list_pids(host):
        with contextlib.suppress(OSError):
            text = (Path("/proc") / str(pid) / "cmdline").read_bytes()
            commands.append(text.replace(b"\0", b" ").decode())
    return [command for command in commands if command.startswith("ray::")]


@contextlib.contextmanager
def start_ray(skyrl: Path, tmp_path: Path) -> Iterator[None]:
    """Start Ray's daemons on both hosts, as their owner does, and end them afterwards."""
    ray, processes = str(skyrl / "skyrl" / "bin" / "ray"), []
    places = (
        ("--head", f"--port={RAY_PORT}", "--include-dashboard=false"),
        (f"--address={ADDRESSES[0]}:{RAY_PORT}",),
    )
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PATH": f"{skyrl / 'skyrl' / 'bin'}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(skyrl / "skyrl"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }
    try:
        for host, address, options in zip(HOSTS, ADDRESSES, places, strict=True):
            command = ["ip", "netns", "exec", host, ray, "start", "--block", "--num-cpus=1",
                       f"--node-ip-address={address}", *options]  # fmt: skip
            with (tmp_path / f"{host}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        command, env=env, stdout=log, stderr=log, start_new_session=True
                    )
                )
            until = deadline(60)
            while b"Ray runtime started" not in (tmp_path / f"{host}.log").read_bytes():
                assert processes[-1].poll() is None, (tmp_path / f"{host}.log").read_text()
                assert time.monotonic() < until
                time.sleep(0.2)
        yield
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(60)
        # Ray notes the newest cluster of the machine for whoever names none.
        Path("/tmp/ray/ray_current_cluster").unlink(missing_ok=True)
