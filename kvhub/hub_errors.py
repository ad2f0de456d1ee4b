"""What the Hub's client raises, as errors that name the cause and the way out.

On a download the client hides refusals and failures behind a LocalEntryNotFoundError, which is a
FileNotFoundError, and its HTTP errors are OSErrors: told apart are their causes.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

from kvhub.errors import (
    AuthError,
    ConflictError,
    KVHubError,
    NetworkError,
    NotFoundError,
    UsageError,
)

__all__ = ["translated"]

LOGIN = "Log in with a token that may do this: hf auth login"
TRY_AGAIN = "Check the network, and HF_ENDPOINT if it is set; then run the same command again."
# What must not be shown: tokens, passwords in an address, and the signatures of signed addresses.
SECRETS = (
    (re.compile(r"\b(hf|api_org)_[\w.-]{16,}"), "<token>"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[^\s'\"]+"), r"\1 <token>"),
    (re.compile(r"://[^/\s@]+@"), "://"),
    (re.compile(r"(?i)(https?://[^\s?'\"]+)\?[^\s'\"]*(sign|token|policy)[^\s'\"]*"), r"\1"),
)


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Turn every error of the Hub's client inside the block into a KVHubError.

    The original is its cause, unless its own text holds a token.

    Parameters
    ----------
    what
        What the block does, with the repository: "reading the versions of org/name".
    """
    from huggingface_hub import errors
    from huggingface_hub.utils import httpx

    try:
        yield
    except KVHubError:
        raise
    # ValueError: the client's own checks, and answers that are not JSON. KeyError: answers that
    # lack a part. RuntimeError: Xet, as well as OSError.
    except (
        errors.EntryNotFoundError,
        httpx.HTTPError,
        httpx.InvalidURL,
        KeyError,
        OSError,
        RuntimeError,
        ValueError,
    ) as error:
        found = _translate(what[:1].upper() + what[1:], error)
        leaks = any(_scrub(str(each)) != str(each) for each in _chain(error))
        raise found from (None if leaks else error)


def _translate(doing: str, error: BaseException) -> KVHubError:
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import httpx

    cause = _cause(error)
    hub = f"the Hub at {_scrub(constants.ENDPOINT)}"
    text = _scrub(" ".join(str(cause).split())) or type(cause).__name__
    if isinstance(cause, errors.HfHubHTTPError):
        return _translate_answer(doing, cause, hub)
    if isinstance(cause, errors.OfflineModeIsEnabled):
        return NetworkError(
            f"{doing} failed: offline mode (HF_HUB_OFFLINE) forbids asking {hub}.",
            "Unset HF_HUB_OFFLINE and run the same command again.",
        )
    if isinstance(cause, errors.LocalEntryNotFoundError):
        return NetworkError(
            f"{doing} failed: it is not in the cache, and {hub} was not asked.", TRY_AGAIN
        )
    if isinstance(cause, errors.LocalTokenNotFoundError):
        return AuthError(f"{doing} failed: {hub} wants a token, and there is none.", LOGIN)
    if isinstance(cause, errors.EntryNotFoundError):
        return NotFoundError(
            f"{doing} failed: {hub} has no such file: {text}.", "Check the reference."
        )
    if isinstance(cause, errors.HFValidationError):
        return UsageError(
            f"{doing} failed: {text}", "Give a repository as org/name, of letters, digits, '-._'."
        )
    unreadable = errors.FileMetadataError | json.JSONDecodeError | UnicodeDecodeError | KeyError
    if isinstance(cause, unreadable):
        return NetworkError(
            f"{doing} failed: {hub} gave an answer that is not the Hub's: {text}",
            "Check HF_ENDPOINT and any proxy, and run the same command again.",
        )
    # Of a header, which only the token can make wrong; the first error's text holds it.
    if isinstance(cause, httpx.LocalProtocolError | UnicodeEncodeError):
        return AuthError(f"{doing} failed: the token has characters that none has.", LOGIN)
    if isinstance(cause, httpx.TimeoutException | TimeoutError):
        return NetworkError(
            f"{doing} failed: {hub} did not answer in time ({type(cause).__name__}).", TRY_AGAIN
        )
    if isinstance(cause, httpx.HTTPError | httpx.InvalidURL | ConnectionError):
        return NetworkError(f"{doing} failed: the connection to {hub} failed: {text}", TRY_AGAIN)
    if isinstance(cause, OSError) and cause.errno is not None:
        return UsageError(
            f"{doing} failed: a file on this machine stands in the way: {text}",
            "Check free space and permissions, or let HF_HOME name another folder.",
        )
    if isinstance(cause, ValueError):
        return UsageError(f"{doing} failed: refused as it stands: {text}", "Mend what is named.")
    # A body shorter than announced is a bare OSError, and Xet raises bare RuntimeErrors.
    return NetworkError(f"{doing} failed: the transfer with {hub} failed: {text}", TRY_AGAIN)


def _translate_answer(doing: str, error: BaseException, hub: str) -> KVHubError:
    """Translate an answer with a status that is not success."""
    from huggingface_hub import errors

    # Without the type, which is skipped by mypy.
    response = getattr(error, "response")  # noqa: B009
    status = response.status_code
    said = _scrub(" ".join((getattr(error, "server_message", None) or "").split()))
    answer = f"{hub} answered {status}" + (f" ({said})" if said else "")
    # A gated repository is one that was not found, for the client.
    if isinstance(error, errors.GatedRepoError):
        return AuthError(
            f"{doing} failed: the repository is gated, and access was refused; {answer}.",
            "Ask for access on its page, then run: hf auth login",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return NotFoundError(
            f"{doing} failed: no such revision; {answer}.",
            "See the versions with: kvhub versions REPO",
        )
    if isinstance(error, errors.EntryNotFoundError):
        return NotFoundError(
            f"{doing} failed: no such file at this revision; {answer}.",
            "See the versions with: kvhub versions REPO",
        )
    if isinstance(error, errors.RepositoryNotFoundError) or status == 404:
        return NotFoundError(
            f"{doing} failed: no such repository, or a private one; {answer}.",
            "Check the spelling; for a private one run: hf auth login",
        )
    if status == 401:
        return AuthError(
            f"{doing} failed: not logged in, or the token is refused; {answer}.", LOGIN
        )
    if status in (402, 403):
        return AuthError(f"{doing} failed: not permitted; {answer}.", LOGIN)
    if status in (409, 412):
        reason = "it exists already" if status == 409 else "somebody else was faster"
        return ConflictError(
            f"{doing} failed: {reason}; {answer}.", "Look at what is there, and run it again."
        )
    if status == 429:
        wait = _retry_after(response.headers)
        return NetworkError(
            f"{doing} failed: the rate limit is reached; {answer}"
            + (f" and asks to wait {wait} seconds." if wait else "."),
            f"Run it again {f'in {wait} seconds' if wait else 'later'}; a token raises the limit: "
            "hf auth login",
        )
    if status in (400, 413, 422):
        return UsageError(f"{doing} failed: refused as it stands; {answer}.", "Mend what is named.")
    return NetworkError(f"{doing} failed: {answer}.", "Run the same command again later.")


def _cause(error: BaseException) -> BaseException:
    """Return the error that says why, which the client hides behind one that does not."""
    from huggingface_hub import errors

    hidden = error.__cause__
    # A plain ValueError is what a forced download turns every failure into, and a plain
    # RuntimeError an upload.
    vague = isinstance(error, errors.LocalEntryNotFoundError)
    vague = vague or type(error) in (ValueError, RuntimeError)
    return _cause(hidden) if vague and hidden is not None else error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield all errors that a traceback of this one shows."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _retry_after(headers: dict[str, str]) -> str:
    """Return the seconds that the Hub asks to wait, empty where it does not say."""
    stated = re.fullmatch(r"\s*(\d+)\s*", headers.get("Retry-After", ""))
    found = stated or re.search(r";\s*t\s*=\s*(\d+)", headers.get("RateLimit", ""))
    return found[1] if found else ""


def _scrub(text: str) -> str:
    """Return a text without what must not be shown."""
    from huggingface_hub import get_token

    token = get_token()
    text = text.replace(token, "<token>") if token else text
    for pattern, replacement in SECRETS:
        text = pattern.sub(replacement, text)
    return text
