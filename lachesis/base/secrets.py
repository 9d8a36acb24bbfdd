"""What a child process may see of our environment, and what no text may show of it."""

from __future__ import annotations

import fnmatch
import functools
import logging
import os
import re
from collections.abc import Mapping
from typing import Any

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH(?!OR)", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"://[^/\s:@]*:([^/\s@]+)@")
SHORTEST = 8
"""Characters of a secret; a shorter value, such as "false", stands in many texts."""
ALLOWED = (
    # the system: programs, libraries, language, places for files, the network's proxies and certificates
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "LANG", "LANGUAGE", "LC_*", "TMPDIR", "TEMP", "TMP", "XDG_*",
    "LD_LIBRARY_PATH", "DYLD_*", "*_PROXY", "*_proxy", "SSL_CERT_*", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
    # Python, numbers and devices
    "PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "OMP_*", "MKL_*", "OPENBLAS_*", "NUMEXPR_*", "CUDA_*", "NVIDIA_*", "NCCL_*",
    "PYTORCH_*", "TORCH_*", "TORCHINDUCTOR_*", "HIP_*", "ROCR_*", "TOKENIZERS_PARALLELISM",
    # models and data sets, and this project's own settings
    "HF_*", "HUGGINGFACE_*", "TRANSFORMERS_*", "DO_NOT_TRACK", "LACHESIS_HOME", "LACHESIS_CHECKOUT", "LACHESIS_ENVIRONMENTS",
)  # fmt: skip
"""Names and patterns. Others might be secrets, or mislead: SLURM_* and INFER_TP change server addresses in Atropos, ATROPOS_*
its dialect, OPENAI_* where environments send requests, and PREFECT_* would let a child act on the flow's behalf."""


def redact(text: str) -> str:
    """The text without the values of this process's secrets. Before it is shortened: half a secret is not found any more."""
    for value in secrets(os.environ):
        text = text.replace(value, "***")
    return text


@functools.cache  # once for this process
def redact_log_records() -> None:
    """From now on no log record of this process holds the value of one of its secrets, whoever handles it."""
    make = logging.getLogRecordFactory()

    def redacted(*values: Any, **options: Any) -> logging.LogRecord:
        record = make(*values, **options)
        try:
            text = record.getMessage()
        except (TypeError, ValueError):  # whoever writes it says that its arguments do not fit
            return record
        if (clean := redact(text)) != text:
            record.msg, record.args = clean, ()
        if record.exc_info:
            record.exc_text = redact(logging.Formatter().formatException(record.exc_info))
        return record

    logging.setLogRecordFactory(redacted)


def secrets(source: Mapping[str, str]) -> list[str]:
    """The values that must stand in no text, the longest first, as one may hold another: of the variables that are secrets by
    their names, and passwords in addresses."""
    found = {value for name, value in source.items() if _SECRET.search(name)}
    found |= {password for value in source.values() for password in _IN_ADDRESS.findall(value)}
    found |= {line for value in found for line in value.splitlines()}  # a log is written line by line
    return sorted((value for value in found if len(value) >= SHORTEST), key=len, reverse=True)


def child_environment(extra: Mapping[str, str], source: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that any child may have, then `extra`, which may hold the secrets that this one child needs."""
    base = os.environ if source is None else source
    return {**{name: value for name, value in base.items() if _matches(name, ALLOWED) and not _SECRET.search(name)}, **extra}


def public_variables(prefix: str) -> dict[str, str]:
    """Return this process's variables that begin with `prefix`, without those that are or hold secrets."""
    found = {name: value for name, value in os.environ.items() if name.startswith(prefix)}
    return {name: value for name, value in found.items() if not _SECRET.search(name) and not _IN_ADDRESS.search(value)}


def chosen() -> dict[str, str]:
    """The variables that $LACHESIS_PASS names, or matches, for the processes of environments; the user's own choice, so also
    secrets."""
    patterns = tuple(os.environ.get("LACHESIS_PASS", "").replace(",", " ").split())
    return {name: value for name, value in os.environ.items() if _matches(name, patterns)}


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
