"""A served home in which runs train on SkyRL, alone or with a second host."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.served_home import ROOT, ServedHome
from tests.harness.waiting import wait_until

# Installed once for all test runs of this checkout; it takes some gigabytes.
BACKENDS_HOME = ROOT / ".backends"
HOSTS = ("lachesis-a", "lachesis-b")
ADDRESSES = ("10.203.17.1", "10.203.17.2")
RAY_PORT = 6379


@pytest.fixture(scope="session")
def skyrl():
    """The folder that holds SkyRL's environment, which is made from PyPI's packages."""
    folder = BACKENDS_HOME / "backends"
    if not (folder / "skyrl" / "bin" / "ray").exists():
        command = [sys.executable, "-m", "lachesis.cli.main", "backend", "install", "skyrl"]
        env = {**os.environ, "LACHESIS_HOME": str(BACKENDS_HOME)}
        subprocess.run(command, env=env, check=True, timeout=1200)
    return folder


@pytest.fixture
def make_place(new_home, skyrl):
    """A factory of homes that have the tiny model and SkyRL."""

    def make(prefix=(), **env):
        home = new_home()
        (home / "backends").symlink_to(skyrl)
        return ServedHome(home, prefix, JAX_PLATFORMS="cpu", **env)

    return make


# --- two hosts


def run_ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


def find_namespace_problem():
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
def two_hosts():
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


def _remove_hosts():
    for host in HOSTS:
        if (Path("/run/netns") / host).exists():
            for pid in list_pids(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            run_ip("netns", "del", host)
        shutil.rmtree(Path("/etc/netns") / host, ignore_errors=True)


def list_pids(host):
    listed = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True)
    return [int(pid) for pid in listed.stdout.split()]


def list_workers(host):
    """Return the names of the processes of a host that Ray has started for somebody."""
    commands = []
    for pid in list_pids(host):
        with contextlib.suppress(OSError):
            text = (Path("/proc") / str(pid) / "cmdline").read_bytes()
            commands.append(text.replace(b"\0", b" ").decode())
    return [command for command in commands if command.startswith("ray::")]


@contextlib.contextmanager
def start_ray(skyrl, tmp_path):
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
            file = tmp_path / f"{host}.log"
            with file.open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        command, env=env, stdout=log, stderr=log, start_new_session=True
                    )
                )
            wait_until(
                lambda file=file: "Ray runtime started" in file.read_text(),
                60, process=processes[-1], log=file,
            )  # fmt: skip
        yield
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(60)
        # Ray notes the newest cluster of the machine for whoever names none.
        Path("/tmp/ray/ray_current_cluster").unlink(missing_ok=True)
