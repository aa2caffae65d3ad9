"""Every error the operator part raises on purpose, in one tree; the command line and conditions translate them."""

from __future__ import annotations

from dataclasses import dataclass


class OperatorError(Exception):
    """Base of all errors with a cause a person can act on; `reason` also reaches conditions."""

    reason = "OperatorError"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong with a manifest: where (`spec.engine.blockSize`) and what was given, what is allowed."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class SpecError(OperatorError):
    """A manifest cannot be used; permanent until someone edits it. `problems` is never empty."""

    reason = "InvalidSpec"

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(str(problem) for problem in problems))
        self.problems = problems


class PortError(OperatorError):
    """A port that the manifest asks for is taken, or no free port was found."""

    reason = "PortInUse"


class ChildFailedError(OperatorError):
    """A child process cannot start however often it is tried; the message carries its last line."""

    reason = "ChildFailed"
