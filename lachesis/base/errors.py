"""Every error this project raises, with a stable code that programs may match on, and its HTTP
status.

Errors that no program would tell apart have the same code.

    LachesisError                    lachesis_error
    ├── ConfigError                  config              also ValueError
    │   ├── UnknownFieldError        unknown_field       also LookupError
    │   ├── LockedFieldError         locked_field        also PermissionError
    │   ├── PolicyError              policy              also PermissionError
    │   ├── ArgumentsError           arguments           also TypeError
    │   └── FieldValueError          field_value
    ├── RLEnvironmentError           environment
    │   ├── UnknownEnvironmentError  unknown_environment also LookupError
    │   ├── EnvironmentLoadError     environment         also ImportError
    │   ├── RequirementsError        missing_dependency
    │   ├── StageError               environment
    │   └── EnvironmentTimeoutError  environment         also TimeoutError
    ├── RunError                                         also RuntimeError
    │   ├── UnknownRunError          unknown_run         also LookupError
    │   │   └── UnknownTestError     unknown_run
    │   ├── RunStateError            run_state
    │   │   └── RunSkippedError      run_state
    │   ├── ValidationMissingError   validation_missing
    │   ├── ConfirmationError        confirmation
    │   ├── ProcessExitedError       process_exited
    │   ├── HealthTimeoutError       process_exited      also TimeoutError
    │   └── InvalidGroupsError       invalid_groups
    ├── BatchError                   invalid_groups      also ValueError
    ├── CheckpointError              checkpoint
    ├── WeightSyncError              weight_sync
    ├── EngineRequestError           engine_request      also ValueError
    ├── ModelNotFoundError           model_not_found     also FileNotFoundError
    ├── UnsupportedModelError        unsupported_model
    ├── InsufficientMemoryError      unsupported_model
    ├── MissingDependencyError       missing_dependency  also ImportError
    ├── MissingKeyError              missing_key
    ├── BillingError                 billing
    ├── SessionLostError             server_down
    ├── ServerDownError              server_down         also ConnectionError
    ├── ServerProtocolError          server_protocol
    ├── PortInUseError               config              also OSError
    └── StorageError                 storage             also OSError

A message says what happened, the value, what is allowed, and the next step.
"""

import functools
from typing import Any


class LachesisError(Exception):
    """The base of all errors; `details` holds further keys for programs, such as `available`."""

    code = "lachesis_error"
    http_status = 500

    def __init__(self, message: str, **details: object) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, Any] = details

    def __str__(self) -> str:
        return self.message


class ConfigError(LachesisError, ValueError):
    """Report a configuration that cannot be used."""

    code = "config"
    http_status = 400


class UnknownFieldError(ConfigError, LookupError):
    """Neither the project nor the environment has a field of this name."""

    code = "unknown_field"
    http_status = 404


class LockedFieldError(ConfigError, PermissionError):
    """The profile does not let its users change this field."""

    code = "locked_field"
    http_status = 403


class PolicyError(ConfigError, PermissionError):
    """The owner's policy does not let agents do this."""

    code = "policy"
    http_status = 403


class FieldValueError(ConfigError):
    """The value has the wrong type or is out of range."""

    code = "field_value"


class ArgumentsError(ConfigError, TypeError):
    """An argument of a tool is missing, unknown, of the wrong type or out of range."""

    code = "arguments"
    http_status = 422


class RLEnvironmentError(LachesisError):
    """An environment file cannot be used."""

    code = "environment"
    http_status = 409


class UnknownEnvironmentError(RLEnvironmentError, LookupError):
    """No environment of that name was found."""

    code = "unknown_environment"
    http_status = 404


class EnvironmentLoadError(RLEnvironmentError, ImportError):
    """The environment file does not parse, or raises an exception while it is imported."""


class RequirementsError(RLEnvironmentError):
    """The environment's requirements are missing, cannot be installed or cannot be read."""

    code = "missing_dependency"


class StageError(RLEnvironmentError):
    """The environment failed the stage of its validation in `details["stage"]`."""


class EnvironmentTimeoutError(RLEnvironmentError, TimeoutError):
    """Importing the environment file took too long."""

    http_status = 504


class RunError(LachesisError, RuntimeError):
    """Something is wrong with one training run or test."""

    http_status = 409


class UnknownRunError(RunError, LookupError):
    """There is no run, or no test, with this id."""

    code = "unknown_run"
    http_status = 404


class UnknownTestError(UnknownRunError):
    """There is no inference test with this id."""


class RunStateError(RunError):
    """The state of the run does not allow this operation."""

    code = "run_state"


class RunSkippedError(RunStateError):
    """A scheduled run was skipped, because an earlier run of the same schedule has not ended."""


class ValidationMissingError(RunError):
    """The run requires a recent successful validation of its environment, and there is none."""

    code = "validation_missing"


class ConfirmationError(RunError):
    """A run would cost money, and its user has not agreed to that."""

    code = "confirmation"


class ProcessExitedError(RunError):
    """A process of the run ended before its work was done."""

    code = "process_exited"


class HealthTimeoutError(RunError, TimeoutError):
    """A process runs but did not become ready in time."""

    code = ProcessExitedError.code


class InvalidGroupsError(RunError):
    """The environments of the run produced only groups that cannot be trained on."""

    code = "invalid_groups"


class BatchError(LachesisError, ValueError):
    """The batch of scored rollouts cannot be trained on."""

    code = InvalidGroupsError.code
    http_status = 409


class CheckpointError(LachesisError):
    """A checkpoint is missing, incomplete or unreadable."""

    code = "checkpoint"
    http_status = 409


class WeightSyncError(LachesisError):
    """The weights that environments sample from differ from those in training."""

    code = "weight_sync"
    http_status = 409


class EngineRequestError(LachesisError, ValueError):
    """The embedded engine cannot serve this request; the engine continues."""

    code = "engine_request"
    http_status = 400


class ModelNotFoundError(LachesisError, FileNotFoundError):
    """The model of this name or path cannot be loaded."""

    code = "model_not_found"
    http_status = 404


class UnsupportedModelError(LachesisError):
    """The engine can load the model but cannot sample from it."""

    code = "unsupported_model"
    http_status = 409


class InsufficientMemoryError(LachesisError):
    """A model, or a single sequence, needs more memory than the device has."""

    code = UnsupportedModelError.code
    http_status = 409


class MissingDependencyError(LachesisError, ImportError):
    """An optional package is not installed."""

    code = "missing_dependency"
    http_status = 409


def make_embedded_error(part: str, packages: str) -> MissingDependencyError:
    """Return the error for packages of the embedded engine that a part needs and lacks."""
    return MissingDependencyError(
        f"{part} needs {packages}, which is not installed; install it with "
        "`pip install 'lachesis-rl[embedded]'`"
    )


class MissingKeyError(LachesisError):
    """A key that the profile needs is not in the environment variables."""

    code = "missing_key"
    http_status = 409


class BillingError(LachesisError):
    """The provider asks for payment before it goes on."""

    code = "billing"
    http_status = 402


class SessionLostError(LachesisError):
    """The Tinker server has ended the session of a run; its checkpoints are kept."""

    code = "server_down"
    http_status = 503


class ServerDownError(LachesisError, ConnectionError):
    """A service does not answer."""

    code = "server_down"
    http_status = 503


class ServerProtocolError(LachesisError):
    """A Tinker server answers in another way than the protocol says."""

    code = "server_protocol"
    http_status = 502


class PortInUseError(LachesisError, OSError):
    """Another process already listens on the port."""

    code = ConfigError.code
    http_status = 409


class StorageError(LachesisError, OSError):
    """The disk refused to read or write a file."""

    code = "storage"
    http_status = 507


@functools.cache
def list_error_codes() -> frozenset[str]:
    """Return the codes of all errors."""
    error_classes: list[type[LachesisError]] = [LachesisError]
    for error_class in error_classes:
        error_classes += error_class.__subclasses__()
    return frozenset(error_class.code for error_class in error_classes)


def shorten(text: str, max_chars: int = 200) -> str:
    """Return the text, cut to `max_chars` for use in a message, with its full length appended."""
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}… ({len(text)} characters)"
