"""Choose which environment variables a child process gets, and remove secrets from texts."""

import fnmatch
import functools
import logging
import os
import re
from collections.abc import Mapping

_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH(?!OR)", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"://[^/\s:@]*:([^/\s@]+)@")
# A shorter value, such as "false", is no secret and occurs in many texts.
MIN_SECRET_LENGTH = 8
# Names and patterns of the variables that every child gets.
#
# Others might be secrets or change what a child does: SLURM_* and INFER_TP change server addresses
# in Atropos, ATROPOS_* its dialect, OPENAI_* where environments send requests, and PREFECT_* would
# let a child act on the flow's behalf.
INHERITED_VARIABLES = (
    # the system: programs, libraries, language, places for files, the network's proxies and
    # certificates
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "LANG", "LANGUAGE", "LC_*", "TMPDIR",
    "TEMP", "TMP", "XDG_*",
    "LD_LIBRARY_PATH", "DYLD_*", "*_PROXY", "*_proxy", "SSL_CERT_*", "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    # Python, numbers and devices
    "PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "OMP_*", "MKL_*", "OPENBLAS_*", "NUMEXPR_*", "CUDA_*",
    "NVIDIA_*", "NCCL_*",
    "PYTORCH_*", "TORCH_*", "TORCHINDUCTOR_*", "HIP_*", "ROCR_*", "TOKENIZERS_PARALLELISM",
    # models and data sets, and this project's own settings
    "HF_*", "HUGGINGFACE_*", "TRANSFORMERS_*", "DO_NOT_TRACK", "LACHESIS_HOME", "LACHESIS_CHECKOUT",
    "LACHESIS_ENVIRONMENTS",
)  # fmt: skip
# Secrets of this process that are not in its environment.
_remembered_secrets: set[str] = set()


def remember_secret(value: str) -> None:
    """Redact this value too from now on."""
    _remembered_secrets.add(value)


def redact(text: str) -> str:
    """Return the text with the values of this process's secrets replaced by `***`.

    Redact before shortening a text: half of a secret is not recognised.
    """
    remembered = {f"KEY_{number}": value for number, value in enumerate(_remembered_secrets)}
    for value in find_secret_values({**os.environ, **remembered}):
        text = text.replace(value, "***")
    return text


@functools.cache  # once for this process
def redact_log_records() -> None:
    """Remove this process's secrets from all its log records from now on."""
    make_record = logging.getLogRecordFactory()

    def make_redacted_record(*args: object, **kwargs: object) -> logging.LogRecord:
        """Return a log record whose text and traceback hold no secret."""
        record = make_record(*args, **kwargs)
        try:
            text = record.getMessage()
        except (TypeError, ValueError):  # The handler will report that the arguments do not fit.
            return record
        if (clean := redact(text)) != text:
            record.msg, record.args = clean, ()
        if record.exc_info:
            record.exc_text = redact(logging.Formatter().formatException(record.exc_info))
        return record

    logging.setLogRecordFactory(make_redacted_record)


def find_secret_values(source: Mapping[str, str]) -> list[str]:
    """Return the values that no text may show, the longest first because one may contain another.

    These are the values of variables whose names say that they are secret, and passwords in URLs.
    """
    values = {value for name, value in source.items() if _SECRET_NAME.search(name)}
    values |= {password for value in source.values() for password in _URL_PASSWORD.findall(value)}
    # Logs are redacted line by line, so each line of a secret is a secret.
    values |= {line for value in values for line in value.splitlines()}
    return sorted(
        (value for value in values if len(value) >= MIN_SECRET_LENGTH), key=len, reverse=True
    )


def build_child_env(
    extra: Mapping[str, str], source: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment of a child: the inherited variables, then `extra`.

    `extra` may hold the secrets that this one child needs.
    """
    parent_env = os.environ if source is None else source
    return {
        **{
            name: value
            for name, value in parent_env.items()
            if _matches(name, INHERITED_VARIABLES) and not _SECRET_NAME.search(name)
        },
        **extra,
    }


def read_public_variables(prefix: str) -> dict[str, str]:
    """Return the variables with this prefix, except those that hold secrets."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(prefix)}
    return {
        name: value
        for name, value in variables.items()
        if not _SECRET_NAME.search(name) and not _URL_PASSWORD.search(value)
    }


def read_passed_variables() -> dict[str, str]:
    """Return the variables that `$LACHESIS_ENVIRONMENT_VARIABLES` passes to environments.

    Names may be patterns. The user chooses them, so secrets are included.
    """
    names = os.environ.get("LACHESIS_ENVIRONMENT_VARIABLES", "")
    patterns = tuple(names.replace(",", " ").split())
    return {name: value for name, value in os.environ.items() if _matches(name, patterns)}


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
