"""Signatures: who made a package, beyond its own word for what it holds.

A signature is the file kvhub.sig beside the package's files, an OpenSSF Model Signing bundle over
the names and sha256 of all of them, manifest.json included. It is made with an elliptic-curve key
pair and needs no network. Whoever has the public key checks it before a byte of the package is
parsed. It does not say which repository or version the package belongs to; a lock file does.
"""

import base64
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvhub.atomic import write_text
from kvhub.errors import NotFoundError, UsageError, VerificationError

__all__ = ["SIGNATURE", "listed_names", "sign", "verify_signature"]

SIGNATURE = "kvhub.sig"
# What `kvhub.package.IGNORED` matches: no part of the package.
UNSIGNED = (".cache", ".git", ".gitattributes", ".gitignore", SIGNATURE, "status.json")

_MAKE_KEYS = (
    "Make a pair: openssl ecparam -name prime256v1 -genkey -noout -out kvhub.key; "
    "openssl ec -in kvhub.key -pubout -out kvhub.pub"
)
# What the library, and reading its bundles, raises on one that is damaged.
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
_DISTRUST = "Do not load it: download it again, and compare the key with the one its author gives."


def sign(directory: Path, private_key: Path) -> Path:
    """Sign a package as it stands; a signature that is there is replaced.

    Parameters
    ----------
    directory
        The package; verified first.
    private_key
        A PEM file without a password, of the curve P-256, P-384 or P-521.

    Returns
    -------
    path
        The signature. Any later change of the package, even of its card, makes it fail.

    Raises
    ------
    UsageError
        model-signing is not installed, or the key cannot sign.
    NotFoundError, VerificationError
        There is no key or no package, or it is damaged.
    """
    signing, _, _ = _library()
    from kvhub.package import verify

    _require_key(private_key)
    config = signing.Config().set_hashing_config(_hashing())
    with _readable(private_key, "private"):
        config.use_elliptic_key_signer(private_key=private_key)
    verify(directory)
    # Not beside the files, where it would be signed with them.
    with tempfile.TemporaryDirectory() as folder:
        config.sign(directory, Path(folder) / SIGNATURE)
        write_text(directory / SIGNATURE, (Path(folder) / SIGNATURE).read_text(encoding="utf-8"))
    return directory / SIGNATURE


def verify_signature(directory: Path, public_key: Path) -> None:
    """Check that a package is, file by file, the one that the owner of a key signed.

    Nothing in it but the signature is parsed, so do this before anything else.

    Parameters
    ----------
    directory
        The package.
    public_key
        The signer's, as a PEM file; from the signer, and never from the package's own repository.

    Raises
    ------
    UsageError
        model-signing is not installed, or the file is not such a key.
    NotFoundError
        There is no such directory or no such key.
    VerificationError
        There is no signature, it is another key's, or a file was changed, added or removed.
    """
    _, verifying, invalid_signature = _library()
    _require_key(public_key)
    signature = directory / SIGNATURE
    if not directory.is_dir():
        raise NotFoundError(f"There is no package {directory}.", "See `kvhub list`.")
    if not signature.is_file():
        raise VerificationError(
            f"{directory} is not signed: expected the file {SIGNATURE}, found none.",
            "Ask its author to sign it, or load it without asking for a signature.",
        )
    config = verifying.Config().set_hashing_config(_hashing())
    with _readable(public_key, "public"):
        config.use_elliptic_key_verifier(public_key=public_key)
    try:
        # The library prints warnings, and stdout is for results.
        with contextlib.redirect_stdout(sys.stderr):
            config.verify(directory, signature)
        left_out = _left_out(signature)
    except (*_MALFORMED, invalid_signature) as error:
        reason = _changes(directory, signature) or str(error) or "the signature is wrong"
        raise VerificationError(
            f"{directory} is not what the owner of {public_key} signed: {reason.rstrip('. ')}.",
            _DISTRUST,
        ) from error
    if left_out:
        raise VerificationError(
            f"The signature of {directory} leaves out {left_out}; expected all of its files.",
            _DISTRUST,
        )


def listed_names(signature: Path) -> list[str]:
    """Return the files that a signature speaks about, by its own word: it is not checked here.

    Raises
    ------
    VerificationError
        It is no signature, or lists what cannot be a package's file.
    """
    try:
        names = [str(item["name"]) for item in _statement(signature)["predicate"]["resources"]]
    except _MALFORMED as error:
        raise VerificationError(f"{signature} is not a signature.", _DISTRUST) from error
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise VerificationError(f"{signature} lists the file {name!r}.", _DISTRUST)
    return names


def _left_out(signature: Path) -> list[str]:
    """What a valid signature does not speak about although it is part of the package.

    The library lets the signer of a bundle decide that, and takes it from the bundle.
    """
    serialization = _statement(signature)["predicate"].get("serialization", {})
    return sorted(set(serialization.get("ignore_paths", ())) - set(UNSIGNED))


def _changes(directory: Path, signature: Path) -> str:
    """How the files differ from what the bundle lists, for people: the library prints digests."""
    try:
        listed = {
            item["name"]: item["digest"] for item in _statement(signature)["predicate"]["resources"]
        }
        hashed = _hashing().hash(directory).resource_descriptors()
    except _MALFORMED:
        return ""
    found = {item.identifier: item.digest.digest_hex for item in hashed}
    changes = {
        "changed": [name for name in found if listed.get(name, found[name]) != found[name]],
        "added": sorted(found.keys() - listed.keys()),
        "missing": sorted(listed.keys() - found.keys()),
    }
    return ", ".join(f"{change} {names}" for change, names in changes.items() if names)


def _statement(signature: Path) -> dict[str, Any]:
    bundle = json.loads(signature.read_text(encoding="utf-8"))
    statement: dict[str, Any] = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    return statement


def _library() -> tuple[Any, Any, type[Exception]]:
    try:
        from cryptography.exceptions import InvalidSignature
        from model_signing import signing, verifying
    except ModuleNotFoundError as error:
        raise UsageError(
            f"Signatures need the package model-signing ({error}).",
            'Install it: pip install "kvhub[sign]"',
        ) from error
    return signing, verifying, InvalidSignature


def _hashing() -> Any:
    from model_signing import hashing

    # The Hub's cache is made of links. Only what `UNSIGNED` says is left out: the library's own
    # list of git's files has a folder that a package could hide something in.
    return (
        hashing.Config()
        .set_ignored_paths(paths=UNSIGNED, ignore_git_paths=False)
        .set_allow_symlinks(True)
    )


def _require_key(path: Path) -> None:
    if not path.is_file():
        raise NotFoundError(f"There is no key {path}.", _MAKE_KEYS)


@contextlib.contextmanager
def _readable(path: Path, kind: str) -> Iterator[None]:
    """Errors of reading a key, without a word of its content."""
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        yield
    except (ValueError, TypeError, AttributeError, UnsupportedAlgorithm) as error:
        raise UsageError(
            f"{path} cannot be used: expected a {kind} key in PEM without a password, of the "
            "curve P-256, P-384 or P-521.",
            _MAKE_KEYS,
        ) from error
