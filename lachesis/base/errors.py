"""Every error this project raises, each with a stable code that programs may match on.

    LachesisError                    lachesis_error
    ├── ConfigError                  config              also ValueError
    │   ├── UnknownFieldError        unknown_field       also LookupError
    │   ├── LockedFieldError         locked_field        also PermissionError
    │   ├── ArgumentsError           arguments           also TypeError
    │   └── FieldValueError          field_value
    ├── RLEnvironmentError           environment
    │   ├── UnknownEnvironmentError  unknown_environment also LookupError
    │   ├── EnvironmentLoadError     environment_load    also ImportError
    │   ├── RequirementsError        requirements
    │   ├── StageError               stage
    │   └── EnvironmentTimeoutError  environment_timeout also TimeoutError
    ├── RunError                     run                 also RuntimeError
    │   ├── UnknownRunError          unknown_run         also LookupError
    │   ├── UnknownTestError         unknown_test        also LookupError
    │   ├── RunStateError            run_state
    │   ├── ValidationMissingError   validation_missing
    │   ├── ProcessExitedError       process_exited
    │   ├── HealthTimeoutError       health_timeout      also TimeoutError
    │   └── InvalidGroupsError       invalid_groups
    ├── BatchError                   batch               also ValueError
    ├── CheckpointError              checkpoint
    ├── WeightSyncError              canary
    ├── EngineRequestError           engine_request      also ValueError
    ├── ModelNotFoundError           model_not_found     also FileNotFoundError
    ├── UnsupportedModelError        unsupported_model
    ├── MissingDependencyError       missing_dependency  also ImportError
    ├── MissingKeyError              missing_key
    ├── ServerDownError              server_down         also ConnectionError
    ├── PortInUseError               port_in_use         also OSError
    └── StorageError                 storage             also OSError

A message says what happened, the value, what is allowed, and where to look.
"""

from __future__ import annotations

import functools
from typing import Any


class LachesisError(Exception):
    """The root. `details` holds further keys for a program, such as `available`."""

    code = "lachesis_error"

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def __str__(self) -> str:
        return self.message


class ConfigError(LachesisError, ValueError):
    """A configuration that cannot work."""

    code = "config"


class UnknownFieldError(ConfigError, LookupError):
    """A field that neither the project nor the environment has."""

    code = "unknown_field"


class LockedFieldError(ConfigError, PermissionError):
    """A field that this profile does not let its users change."""

    code = "locked_field"


class FieldValueError(ConfigError):
    """A value of the wrong type or out of range."""

    code = "field_value"


class ArgumentsError(ConfigError, TypeError):
    """Arguments of a tool that are missing, unknown, of the wrong type or out of range."""

    code = "arguments"


class RLEnvironmentError(LachesisError):
    """Something about an environment file."""

    code = "environment"


class UnknownEnvironmentError(RLEnvironmentError, LookupError):
    """No environment of that name was found."""

    code = "unknown_environment"


class EnvironmentLoadError(RLEnvironmentError, ImportError):
    """An environment file that does not parse, or raises while it is imported."""

    code = "environment_load"


class RequirementsError(RLEnvironmentError):
    """An environment whose declared requirements are not there, cannot be installed, or cannot be
    read.
    """

    code = "requirements"


class StageError(RLEnvironmentError):
    """A stage of a validation that an environment did not pass; `details["stage"]` names it."""

    code = "stage"


class EnvironmentTimeoutError(RLEnvironmentError, TimeoutError):
    """An environment file whose import did not end in time."""

    code = "environment_timeout"


class RunError(LachesisError, RuntimeError):
    """Something about one training run."""

    code = "run"


class UnknownRunError(RunError, LookupError):
    """No run of that id."""

    code = "unknown_run"


class UnknownTestError(RunError, LookupError):
    """No inference test of that id."""

    code = "unknown_test"


class RunStateError(RunError):
    """The run is not in a state that allows this."""

    code = "run_state"


class ValidationMissingError(RunError):
    """A run asks for a fresh successful validation of its environment, and there is none."""

    code = "validation_missing"


class ProcessExitedError(RunError):
    """A process of the run ended when it should have gone on."""

    code = "process_exited"


class HealthTimeoutError(RunError, TimeoutError):
    """A process is alive but did not become healthy in time."""

    code = "health_timeout"


class InvalidGroupsError(RunError):
    """The environments of a run have given only groups that it cannot train on."""

    code = "invalid_groups"


class BatchError(LachesisError, ValueError):
    """A batch of scored rollouts that cannot be trained on."""

    code = "batch"


class CheckpointError(LachesisError):
    """A checkpoint that is absent, incomplete or cannot be read."""

    code = "checkpoint"


class WeightSyncError(LachesisError):
    """What environments sample from is not what is trained."""

    code = "canary"


class EngineRequestError(LachesisError, ValueError):
    """A request to the embedded engine that cannot be served; the client is told, the engine goes
    on.
    """

    code = "engine_request"


class ModelNotFoundError(LachesisError, FileNotFoundError):
    """A model name or path that cannot be loaded."""

    code = "model_not_found"


class UnsupportedModelError(LachesisError):
    """A model that loads and that the engine cannot sample."""

    code = "unsupported_model"


class MissingDependencyError(LachesisError, ImportError):
    """An optional part is not installed."""

    code = "missing_dependency"


class MissingKeyError(LachesisError):
    """A key that the chosen profile needs is not in the environment."""

    code = "missing_key"


class ServerDownError(LachesisError, ConnectionError):
    """A service that should answer does not."""

    code = "server_down"


class PortInUseError(LachesisError, OSError):
    """Another process listens on the port."""

    code = "port_in_use"


class StorageError(LachesisError, OSError):
    """The disk refused a read or a write."""

    code = "storage"


@functools.cache
def list_error_codes() -> frozenset[str]:
    """Return the codes of all errors."""
    error_classes: list[type[LachesisError]] = [LachesisError]
    for error_class in error_classes:
        error_classes += error_class.__subclasses__()
    return frozenset(error_class.code for error_class in error_classes)


def shorten(text: str, max_chars: int = 200) -> str:
    """For a message: a value may be megabytes of somebody's mistake."""
    return text if len(text) <= max_chars else f"{text[:max_chars]}… ({len(text)} characters)"
