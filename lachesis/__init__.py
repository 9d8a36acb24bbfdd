"""Lachesis: reinforcement-learning runs of language models, for people and agents."""

import os

__version__ = "0.2.0.dev0"


def _exempt_loopback_from_proxies() -> None:
    """Name loopback in `NO_PROXY` where a proxy is set, for this process and its children.

    Our programs talk to each other on loopback, by clients of our own and of libraries, such as
    Prefect's and Tinker's. A proxy cannot reach them. Without a proxy's variable nothing is set,
    because `NO_PROXY` alone would switch off the proxy of macOS's settings.
    """
    if not any(name.lower().endswith("_proxy") for name in os.environ):
        return
    hosts = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    names = [name.strip() for name in hosts.split(",") if name.strip()]
    names += [name for name in ("127.0.0.1", "localhost", "::1") if name not in names]
    # Some libraries read the one name, some the other.
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(names)


# Before anything is imported that reads these variables.
_exempt_loopback_from_proxies()
