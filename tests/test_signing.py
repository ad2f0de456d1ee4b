"""A signature says who made a package, and is checked before anything of it is read."""

import base64
import json
import subprocess
import sys

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from mapping import random_mapper
from regression import spec

from kvhub.errors import NotFoundError, UsageError, VerificationError
from kvhub.package import IGNORED, load, verify
from kvhub.signing import SIGNATURE, UNSIGNED, sign, verify_signature

FILES = ("README.md", "config.json", "manifest.json", "model.safetensors", "plots/r2.png")


def write_keys(folder, name, key, password=None):
    private, public = folder / f"{name}.key", folder / f"{name}.pub"
    encryption = serialization.NoEncryption()
    if password:
        encryption = serialization.BestAvailableEncryption(password)
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    )
    public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return private, public


@pytest.fixture
def keys(tmp_path):
    return write_keys(tmp_path, "ann", ec.generate_private_key(ec.SECP256R1()))


@pytest.fixture
def other_keys(tmp_path):
    return write_keys(tmp_path, "eve", ec.generate_private_key(ec.SECP256R1()))


@pytest.fixture
def package(tmp_path):
    from kvhub.package import save

    mapper = random_mapper(spec(2, name="org/small"), spec(2, name="org/large"))
    save(mapper, tmp_path / "m", plots={"r2.png": b"\x89PNG"})
    return tmp_path / "m"


@pytest.fixture
def signed(package, keys):
    sign(package, keys[0])
    return package


@pytest.mark.parametrize("curve", [ec.SECP256R1, ec.SECP384R1, ec.SECP521R1])
def test_a_signed_package_verifies_and_still_loads(package, tmp_path, curve):
    private, public = write_keys(tmp_path, "key", ec.generate_private_key(curve()))
    before = verify(package)
    assert sign(package, private) == package / SIGNATURE
    verify_signature(package, public)
    assert verify(package) == before
    load(package)
    assert {path.name for path in package.iterdir()} >= {SIGNATURE, "config.json"}


def test_the_signature_speaks_about_every_file(signed):
    assert set(signed_names(signed)) == set(FILES)


def statement(package):
    bundle = json.loads((package / SIGNATURE).read_text())
    return json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))


def signed_names(package):
    return [resource["name"] for resource in statement(package)["predicate"]["resources"]]


def test_signing_again_replaces_the_signature(signed, keys, other_keys):
    sign(signed, other_keys[0])
    verify_signature(signed, other_keys[1])
    with pytest.raises(VerificationError):
        verify_signature(signed, keys[1])


@pytest.mark.parametrize("name", FILES)
def test_every_changed_byte_of_a_file_is_noticed(signed, keys, name):
    path = signed / name
    whole = path.read_bytes()
    # Every byte of a small file, and some from all over a large one.
    for at in range(0, len(whole), max(1, len(whole) // 12)):
        changed = bytearray(whole)
        changed[at] ^= 1 << (at % 8)
        path.write_bytes(changed)
        with pytest.raises(VerificationError, match=rf"signed: changed \['{name}'\]\."):
            verify_signature(signed, keys[1])
    path.write_bytes(whole + b" ")
    with pytest.raises(VerificationError, match="signed: changed"):
        verify_signature(signed, keys[1])
    path.write_bytes(whole)
    verify_signature(signed, keys[1])


@pytest.mark.parametrize("name", FILES)
def test_a_removed_file_is_noticed(signed, keys, name):
    (signed / name).unlink()
    with pytest.raises(VerificationError, match=rf"signed: missing \['{name}'\]\."):
        verify_signature(signed, keys[1])


@pytest.mark.parametrize("name", ["extra.py", "plots/more.png", ".github/run.yml", "a/kvhub.sig"])
def test_an_added_file_is_noticed(signed, keys, name):
    (signed / name).parent.mkdir(exist_ok=True)
    (signed / name).write_text("x")
    with pytest.raises(VerificationError, match=rf"signed: added \['{name}'\]\."):
        verify_signature(signed, keys[1])


def test_what_is_no_part_of_the_package_may_change(signed, keys):
    for name in ("status.json", ".gitattributes", ".gitignore", ".cache/x", ".git/HEAD"):
        assert IGNORED.fullmatch(name)
        assert name.split("/")[0] in UNSIGNED
        (signed / name).parent.mkdir(exist_ok=True)
        (signed / name).write_text("x")
    assert len(UNSIGNED) == IGNORED.pattern.count("|") + 1
    verify_signature(signed, keys[1])


def test_another_key_is_refused(signed, keys, other_keys):
    with pytest.raises(VerificationError, match="Key mismatch"):
        verify_signature(signed, other_keys[1])
    # Also where the bundle claims to be of that key.
    bundle = json.loads((signed / SIGNATURE).read_text())
    sign(signed, other_keys[0])
    theirs = json.loads((signed / SIGNATURE).read_text())
    bundle["verificationMaterial"] = theirs["verificationMaterial"]
    (signed / SIGNATURE).write_text(json.dumps(bundle))
    with pytest.raises(VerificationError, match="the signature is wrong"):
        verify_signature(signed, other_keys[1])


def test_the_signature_of_another_package_is_refused(signed, keys, tmp_path):
    other = random_mapper(spec(2, name="org/small"), spec(2, name="org/large"), seed=1)
    other.save_pretrained(tmp_path / "other")
    sign(tmp_path / "other", keys[0])
    (tmp_path / "other" / SIGNATURE).replace(signed / SIGNATURE)
    with pytest.raises(VerificationError, match="signed: changed"):
        verify_signature(signed, keys[1])


def test_a_package_without_a_signature_is_refused_with_a_way_out(package, keys):
    with pytest.raises(VerificationError, match=r"is not signed: expected .*kvhub\.sig") as caught:
        verify_signature(package, keys[1])
    assert "Ask its author to sign it" in caught.value.hint


def test_the_signature_is_checked_before_anything_is_parsed(signed, keys, monkeypatch):
    # All of it is malformed, and only the signature's error is seen.
    for name in ("config.json", "manifest.json", "model.safetensors"):
        (signed / name).write_bytes(b"{")
    with pytest.raises(VerificationError, match="is not what the owner of"):
        verify_signature(signed, keys[1])
    # And with a good one no file is opened but to be hashed: what is malformed stays unseen.
    monkeypatch.setattr("kvhub.package.verify", lambda directory: None)
    sign(signed, keys[0])
    verify_signature(signed, keys[1])


def test_a_damaged_signature_is_refused_and_never_crashes(signed, keys):
    path = signed / SIGNATURE
    whole = path.read_bytes()
    bundle = json.loads(whole)
    broken = [whole[:200], b"", b"\xff\xfe", b"[]", b"{}", b"null", b'"x"', b"[" * 10**5]
    for part in bundle:
        broken += [changed(bundle, part, value) for value in (None, {}, [], "x", 1)]
        broken.append(json.dumps({key: bundle[key] for key in bundle if key != part}).encode())
    for part in bundle["dsseEnvelope"]:
        for value in (None, {}, [], "x", 1, ["x"]):
            envelope = {**bundle["dsseEnvelope"], part: value}
            broken.append(changed(bundle, "dsseEnvelope", envelope))
    for data in broken:
        path.write_bytes(data)
        with pytest.raises(VerificationError):
            verify_signature(signed, keys[1])


def changed(bundle, part, value):
    return json.dumps({**bundle, part: value}).encode()


def test_a_changed_byte_of_the_signature_is_refused_or_means_the_same(signed, keys):
    path = signed / SIGNATURE
    whole = path.read_bytes()
    refused = 0
    for at in range(0, len(whole), 23):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            verify_signature(signed, keys[1])
        except VerificationError:
            refused += 1
    assert refused > 0.8 * len(whole) / 23


def test_a_signer_who_leaves_files_out_is_refused(package, keys):
    # As somebody could do with the library's own command and the right key.
    from model_signing import hashing, signing

    ignored = [*UNSIGNED, "config.json"]
    config = hashing.Config().set_ignored_paths(paths=ignored, ignore_git_paths=False)
    signer = signing.Config().use_elliptic_key_signer(private_key=keys[0])
    signer.set_hashing_config(config).sign(package, package / SIGNATURE)
    (package / "config.json").write_text("{}")
    with pytest.raises(VerificationError, match=r"leaves out \['config.json'\]"):
        verify_signature(package, keys[1])


def test_a_signature_holds_in_the_hubs_cache_which_is_made_of_links(signed, keys, tmp_path):
    snapshot = tmp_path / "snapshots" / "commit"
    for number, path in enumerate(sorted(signed.rglob("*"))):
        if path.is_file():
            link = snapshot / path.relative_to(signed)
            link.parent.mkdir(parents=True, exist_ok=True)
            blob = tmp_path / f"blob{number}"
            path.rename(blob)
            link.symlink_to(blob)
    verify_signature(snapshot, keys[1])
    (snapshot / "config.json").resolve().write_text("{}")
    with pytest.raises(VerificationError, match=r"signed: changed \['config\.json'\]"):
        verify_signature(snapshot, keys[1])


def test_a_damaged_package_is_not_signed(package, keys):
    (package / "config.json").write_text("{}")
    with pytest.raises(VerificationError, match="truncated or edited"):
        sign(package, keys[0])
    assert not (package / SIGNATURE).exists()


def test_keys_that_cannot_be_used_are_told_apart(package, signed, tmp_path, keys):
    with pytest.raises(NotFoundError, match="no key") as caught:
        sign(package, tmp_path / "none.key")
    assert "openssl ecparam" in caught.value.hint
    with pytest.raises(NotFoundError, match="no package"):
        verify_signature(tmp_path / "none", keys[1])
    locked = write_keys(tmp_path, "locked", ec.generate_private_key(ec.SECP256R1()), b"secret")
    koblitz = write_keys(tmp_path, "koblitz", ec.generate_private_key(ec.SECP256K1()))
    edwards = write_keys(tmp_path, "edwards", ed25519.Ed25519PrivateKey.generate())
    (tmp_path / "text").write_text("no key at all")
    for path in (locked[0], koblitz[0], edwards[0], keys[1], tmp_path / "text"):
        with pytest.raises(UsageError, match="expected a private key") as caught:
            sign(package, path)
        assert path.read_text() not in str(caught.value)
    for path in (koblitz[1], edwards[1], keys[0], tmp_path / "text"):
        with pytest.raises(UsageError, match="expected a public key"):
            verify_signature(signed, path)


@pytest.mark.parametrize("missing", ["model_signing", "OpenSSL"])
def test_without_the_library_the_error_says_what_to_install(package, keys, missing):
    code = f"""
import sys
from pathlib import Path
sys.modules[{missing!r}] = None
from kvhub.errors import UsageError
from kvhub.signing import verify_signature
assert "torch" not in sys.modules
try:
    verify_signature(Path({str(package)!r}), Path({str(keys[1])!r}))
except UsageError as error:
    print(error.hint)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == 'Install it: pip install "kvhub[sign]"', done.stderr
