"""What can go wrong, and the exit code each has on the command line.

    KVHubError                     1  unexpected
    ├── UsageError                 2  an argument, file or data set that cannot work
    ├── NotFoundError              3  no such mapper, model, recipe, file or revision
    ├── AuthError                  4  not logged in, no permission, or gated
    ├── NetworkError               5  the Hub could not be reached, or offline mode
    ├── IncompatiblePairError      6  these two models, or this mapper and model, do not fit
    ├── VerificationError          7  a package or cache is not what it claims to be
    ├── ConflictError              8  something is already there and would be overwritten
    └── QualityGateError           9  a mapper is not good enough for the stated gate

Every error says what was expected and what was found, and `hint` says what to do next.
"""

__all__ = [
    "AuthError",
    "ConflictError",
    "IncompatiblePairError",
    "KVHubError",
    "NetworkError",
    "NotFoundError",
    "QualityGateError",
    "UsageError",
    "VerificationError",
]


class KVHubError(Exception):
    """The base of every error that kvhub raises on purpose.

    Parameters
    ----------
    message
        What is wrong, with the expected and the found value.
    hint
        What to do about it: the next command or argument.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message} {hint}".rstrip())
        self.message = message
        self.hint = hint


class UsageError(KVHubError, ValueError):
    """An argument, file or data set that cannot work."""

    exit_code = 2


class NotFoundError(KVHubError):
    """No such mapper, model, recipe, file or revision."""

    exit_code = 3


class AuthError(KVHubError):
    """Not logged in, no permission, or the repository is gated."""

    exit_code = 4


class NetworkError(KVHubError):
    """The Hub could not be reached, or offline mode forbids asking it."""

    exit_code = 5


class IncompatiblePairError(KVHubError, ValueError):
    """Two models, or a mapper and a model, do not fit together."""

    exit_code = 6


class VerificationError(KVHubError, ValueError):
    """A package or a cache is not what it claims to be."""

    exit_code = 7


class ConflictError(KVHubError):
    """Something is already there and would be overwritten."""

    exit_code = 8


class QualityGateError(KVHubError):
    """A mapper is not good enough for the gate that was asked for."""

    exit_code = 9
