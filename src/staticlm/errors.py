"""Errors meant for users: one closed family with stable codes.

Every error names what is wrong, what was found, what was expected and what to do. The command line
prints it as one message and exits with code 2; nothing else of ours reaches a user as a traceback.
"""

from __future__ import annotations

from enum import Enum


class Code(str, Enum):
    """Stable identifiers of everything StaticLM refuses. Codes are added, never renamed."""

    # contract: what a program says of itself
    LABEL_MISSING = "contract-label-missing"
    LABEL_MALFORMED = "contract-label-malformed"
    LABEL_UNKNOWN = "contract-label-unknown"
    VERSION_MALFORMED = "contract-version-malformed"
    VERSION_UNKNOWN = "contract-version-unknown"
    METADATA_MISSING = "contract-metadata-missing"
    METADATA_INVALID = "contract-metadata-invalid"
    LAYOUT_INVALID = "contract-layout-invalid"
    METHOD_MISSING = "contract-method-missing"
    SLOT_MISMATCH = "contract-slot-mismatch"
    CACHE_INVALID = "contract-cache-invalid"
    CONTRACT_MISMATCH = "contract-mismatch"

    # program: the file itself
    PROGRAM_NOT_FOUND = "program-not-found"
    PROGRAM_MALFORMED = "program-malformed"
    PROGRAM_UNSUPPORTED = "program-unsupported"

    # artifact directory and tokenizer
    ARTIFACT_INVALID = "artifact-invalid"
    TOKENIZER_MISSING = "tokenizer-missing"
    TOKENIZER_MISMATCH = "tokenizer-mismatch"

    # export
    MODEL_NOT_FOUND = "model-not-found"
    MODEL_INVALID = "model-invalid"
    MODEL_UNSUPPORTED = "model-unsupported"
    EXPORT_OPTION_INVALID = "export-option-invalid"
    EXPORT_FAILED = "export-failed"
    OUTPUT_EXISTS = "output-exists"

    # lowering and backends
    BACKEND_UNKNOWN = "backend-unknown"
    BACKEND_OPTION_UNKNOWN = "backend-option-unknown"
    BACKEND_OPTION_INVALID = "backend-option-invalid"
    BACKEND_UNAVAILABLE = "backend-unavailable"
    PASS_CONTRIBUTION_INVALID = "pass-contribution-invalid"
    LOWERING_FAILED = "lowering-failed"

    # runtime
    REGISTRATION_DUPLICATE = "registration-duplicate"
    REGISTRATION_INVALID = "registration-invalid"
    IO_MANAGER_INVALID = "io-manager-invalid"
    DRIVER_UNAVAILABLE = "driver-unavailable"
    DRIVER_UNSAFE = "driver-unsafe"
    BUFFER_INVALID = "buffer-invalid"
    ALLOCATION_FAILED = "allocation-failed"
    CAPACITY_EXCEEDED = "capacity-exceeded"
    TOKEN_INVALID = "token-invalid"
    SAMPLING_INVALID = "sampling-invalid"
    EXECUTION_FAILED = "execution-failed"
    SESSION_BROKEN = "session-broken"
    CLOSED = "closed"

    # commands
    USAGE = "usage"
    VALIDATION_FAILED = "validation-failed"
    DEPENDENCY_MISSING = "dependency-missing"


class StaticLMError(Exception):
    """Base of all errors meant for users.

    Args:
        code: Stable identifier, see `Code`.
        what: One clause that names the thing that is wrong, without a final full stop.
        found: What was there.
        expected: What should have been there.
        remedy: What the user can do, as a sentence.
    """

    def __init__(
        self,
        code: Code,
        what: str,
        *,
        found: object = None,
        expected: object = None,
        remedy: str | None = None,
    ) -> None:
        self.code = code
        self.what = what
        self.found = found
        self.expected = expected
        self.remedy = remedy
        super().__init__(self._message())

    def _message(self) -> str:
        text = self.what
        if self.found is not None:
            text += f": found {self.found}"
        if self.expected is not None:
            text += f"{';' if self.found is not None else ':'} expected {self.expected}"
        text += "."
        if self.remedy:
            text += f" {self.remedy}"
        return f"{text} [{self.code.value}]"

    def __reduce__(self) -> tuple[object, ...]:
        fields = (self.code, self.what, self.found, self.expected, self.remedy)
        return (_rebuild, (type(self), *fields))


def _rebuild(
    cls: type[StaticLMError],
    code: Code,
    what: str,
    found: object,
    expected: object,
    remedy: str | None,
) -> StaticLMError:
    return cls(code, what, found=found, expected=expected, remedy=remedy)


class ContractError(StaticLMError):
    """A program's I/O contract is absent, unknown, malformed, or disagrees with the program."""


class ProgramError(StaticLMError):
    """A `.pte` file is absent, malformed, or needs what is not here."""


class ArtifactError(StaticLMError):
    """An artifact directory or its tokenizer cannot be used."""


class ExportError(StaticLMError):
    """A model cannot be exported, or the options do not fit it."""


class LoweringError(StaticLMError):
    """A backend, its options or its contributed passes cannot be used."""


class RunnerError(StaticLMError):
    """The runner refuses an action; its state is what it was before."""


class CapacityError(RunnerError):
    """More tokens than the caches hold; nothing was executed."""


class ExecutionError(RunnerError):
    """ExecuTorch reported an error while executing; the session is broken until `reset`."""


class UsageError(StaticLMError):
    """A command or a call was given arguments that do not fit."""
