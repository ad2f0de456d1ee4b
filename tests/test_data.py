"""Token sequences: the same for every format, rank and restart, and never padding."""

import ast
import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path

import pyarrow
import pytest
import torch
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvhub.corpus import describe, documents
from kvhub.data import HELD_OUT_MODULES, evaluation_stream, token_batches
from kvhub.errors import NetworkError, NotFoundError, UsageError
from kvhub.library import library_files, library_passages

ROOT = Path(__file__).parents[1]
BOS, PAD, WORDS = 0, 1, 300


def word_tokenizer(bos=False):
    """One token per word: `w7` is 7; the first ids are special."""
    vocabulary = {"<bos>": BOS, "<pad>": PAD, **{f"w{i}": i for i in range(2, WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", BOS)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", pad_token="<pad>")


def words(first, count):
    return " ".join(f"w{i}" for i in range(first, first + count))


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def sequences_of(batches):
    """Token lists by sequence id, with the padding taken off."""
    found = {}
    for batch in batches:
        for row, index in enumerate(batch.sequence_ids):
            assert index not in found
            length = int(batch.attention_mask[row].sum())
            assert batch.attention_mask[row, length:].eq(0).all()
            assert batch.input_ids[row, length:].eq(PAD).all()
            found[index] = batch.input_ids[row, :length].tolist()
    return found


@pytest.fixture
def corpus(tmp_path):
    """Thirty documents of 20 to 78 words, of which the shorter ones are padded."""
    return write_jsonl(tmp_path / "corpus.jsonl", [words(2 + i, 20 + 2 * i) for i in range(30)])


def test_documents_are_cut_into_full_sequences_and_short_ones_padded(tmp_path):
    texts = [words(2, 15), words(2, 16), words(2, 40), "", words(100, 96)]
    data = write_jsonl(tmp_path / "a.jsonl", texts)
    batches = list(token_batches(word_tokenizer(), data, sequences=5, length=32))
    assert sequences_of(batches) == {
        0: list(range(2, 18)),
        1: list(range(2, 34)),
        2: list(range(100, 132)),
        3: list(range(132, 164)),
        4: list(range(164, 196)),
    }
    assert [batch.input_ids.shape for batch in batches] == [(4, 32), (1, 32)]
    assert sum(int(batch.attention_mask.sum()) for batch in batches) == 16 + 4 * 32
    assert {batch.input_ids.dtype for batch in batches} == {torch.int64}


def test_a_batch_is_no_wider_than_its_longest_sequence(tmp_path):
    data = write_jsonl(tmp_path / "a.jsonl", [words(2, 20), words(2, 24)])
    (batch,) = token_batches(word_tokenizer(), data, sequences=2, length=200)
    assert batch.input_ids.shape == batch.attention_mask.shape == (2, 24)


def test_bos_opens_every_sequence_if_the_tokenizer_opens_texts_with_it(tmp_path):
    data = write_jsonl(tmp_path / "a.jsonl", [words(2, 60), words(2, 20)])
    found = sequences_of(token_batches(word_tokenizer(bos=True), data, sequences=3, length=31))
    assert found == {
        0: [BOS, *range(2, 32)],
        1: [BOS, *range(32, 62)],
        2: [BOS, *range(2, 22)],
    }


@pytest.mark.parametrize("world_size", [2, 3, 7])
@pytest.mark.parametrize("start", [0, 5])
def test_ranks_share_the_sequences_of_one(corpus, world_size, start):
    tokenizer = word_tokenizer()
    options = {"sequences": 25, "length": 24, "start": start}
    alone = sequences_of(token_batches(tokenizer, corpus, **options))
    shares = [
        sequences_of(
            token_batches(
                tokenizer, corpus, **options, batch_size=3, rank=rank, world_size=world_size
            )
        )
        for rank in range(world_size)
    ]
    assert list(alone) == list(range(start, start + 25))
    assert sum(map(len, shares)) == len(alone)
    assert {k: v for share in shares for k, v in share.items()} == alone


def test_a_stream_goes_on_where_another_stopped(corpus):
    tokenizer = word_tokenizer()
    whole = sequences_of(token_batches(tokenizer, corpus, sequences=30, length=24))
    first = sequences_of(islice(token_batches(tokenizer, corpus, sequences=30, length=24), 3))
    rest = sequences_of(token_batches(tokenizer, corpus, sequences=18, length=24, start=12))
    assert list(first) == list(range(12))
    assert first | rest == whole


@pytest.mark.parametrize(("sequences", "rank", "world_size"), [(25, 0, 1), (24, 1, 4), (2, 2, 3)])
def test_the_number_of_batches_is_known_beforehand(corpus, sequences, rank, world_size):
    batches = token_batches(
        word_tokenizer(), corpus, sequences=sequences, length=24, rank=rank, world_size=world_size
    )
    assert len(batches) == len(list(batches))


def test_formats_are_equivalent(tmp_path):
    texts = [words(2, 70), words(90, 33), words(150, 50)]
    jsonl = write_jsonl(tmp_path / "a.jsonl", texts)
    table = pyarrow.table({"id": [1, 2, 3], "text": texts})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    folder = tmp_path / "folder"
    (folder / "b").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "a.txt").write_text(words(2, 99))
    (folder / "notes.pdf").write_bytes(b"\xff")
    (folder / "a.txt").write_text("\ufeff" + texts[0], encoding="utf-8")
    (folder / "b" / "a.md").write_text(texts[1])
    (folder / "b" / "c.py").write_text(texts[2])
    found = [
        sequences_of(token_batches(word_tokenizer(), str(data), sequences=4, length=32))
        for data in (jsonl, tmp_path / "a.parquet", folder)
    ]
    assert len(found[0]) == 4
    assert found[0] == found[1] == found[2]


def test_another_field_can_hold_the_text_and_nulls_are_skipped(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"body": null, "text": "x"}\n\n{"body": "' + words(2, 20) + '"}\n'
    )
    parquet.write_table(pyarrow.table({"body": [None, words(2, 20)]}), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        data = str(tmp_path / name)
        batches = token_batches(word_tokenizer(), data, sequences=1, length=20, text_field="body")
        assert sequences_of(batches) == {0: list(range(2, 22))}


def test_only_as_much_is_read_as_is_asked_for(tmp_path):
    data = write_jsonl(tmp_path / "a.jsonl", [words(2, 32)] * 100)
    with Path(data).open("a") as file:
        file.write("not JSON\n")
    assert len(list(token_batches(word_tokenizer(), data, sequences=60, length=32))) == 15
    with pytest.raises(UsageError, match="line 101"):
        token_batches(word_tokenizer(), data, sequences=101, length=32)


def test_too_few_sequences_are_refused_before_the_first_batch(corpus):
    total = len(sequences_of(token_batches(word_tokenizer(), corpus, sequences=50, length=24)))
    assert total == 50
    with pytest.raises(
        UsageError, match=r"has (\d+) sequences of 24 tokens, expected 900"
    ) as error:
        token_batches(word_tokenizer(), corpus, sequences=900, length=24)
    found = int(error.value.message.split(" has ")[1].split()[0])
    assert len(sequences_of(token_batches(word_tokenizer(), corpus, sequences=found, length=24)))
    with pytest.raises(UsageError, match=f"has 2 sequences .* after the first {found - 2}"):
        token_batches(word_tokenizer(), corpus, sequences=3, length=24, start=found - 2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sequences": 0}, "sequences is 0"),
        ({"length": 1}, "length is 1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"start": -1}, "start is -1"),
        ({"world_size": 0}, "world_size is 0"),
        ({"rank": -1}, "rank is -1"),
        ({"rank": 2, "world_size": 2}, "rank is 2, expected below"),
    ],
)
def test_arguments_out_of_range_are_refused(corpus, wrong, message):
    with pytest.raises(UsageError, match=message):
        token_batches(word_tokenizer(), corpus, **{"sequences": 1, "length": 24, **wrong})


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": \n',
            UsageError,
            r"a\.jsonl, line 2: expected one JSON",
        ),
        ("a.jsonl", b'{"text": "\xff"}\n', UsageError, "line 1: expected one JSON object"),
        ("a.jsonl", b'["text"]\n', UsageError, r"line 1: .* field 'text', found list"),
        ("a.jsonl", b'{"body": "a", "id": 1}\n', UsageError, "field 'text', found body, id"),
        ("a.jsonl", b'{"text": 5}\n', UsageError, "holds int, expected a string"),
        ("a.txt", b"caf\xe9", UsageError, "not UTF-8 text: .* at byte 3"),
        ("a.csv", b"text\n", UsageError, r"suffix '\.csv', expected one of"),
        ("a.parquet", b"PAR1 cut short", UsageError, "cannot be read as Parquet"),
        ("folder/a.csv", b"text\n", NotFoundError, r"no \.txt, .* file in the folder"),
    ],
)
def test_unreadable_files_are_named_with_what_is_wrong(tmp_path, name, content, error, message):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    data = tmp_path / name.split("/")[0]
    with pytest.raises(error, match=message) as raised:
        token_batches(word_tokenizer(), str(data), sequences=1, length=24)
    assert raised.value.hint


def test_a_missing_parquet_column_is_named_with_those_there_are(tmp_path):
    parquet.write_table(pyarrow.table({"id": [1], "body": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match="field 'text', found id, body"):
        next(documents(str(tmp_path / "a.parquet")))


@pytest.mark.parametrize("data", ["missing.txt", "./org/name", "/no/such/folder", "englisch", ""])
def test_data_that_is_nowhere_is_not_found(data):
    with pytest.raises(NotFoundError, match="no text, file or folder") as raised:
        documents(data)
    assert "stdlib, stdlib-held-out, english" in raised.value.hint


@pytest.mark.parametrize(("package", "data"), [("pyarrow", "a.parquet"), ("datasets", "org/name")])
def test_a_missing_extra_is_named_with_the_command_that_installs_it(
    tmp_path, monkeypatch, package, data
):
    (tmp_path / "a.parquet").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=f"package {package}") as raised:
        next(documents(data))
    assert 'pip install "kvhub[data]"' in raised.value.hint


def test_a_dataset_without_network_is_a_network_error():
    for read in (documents, describe):
        with pytest.raises(NetworkError, match=r"org/name could not be read") as raised:
            read("org/name:small")
        assert "english" in raised.value.hint


class FakeHub(BaseHTTPRequestHandler):
    """As much of the Hub as streaming one dataset needs; `gated` and `missing` are refused."""

    commit = "a" * 40
    files = {  # noqa: RUF012
        "README.md": b"---\nconfigs:\n- config_name: small\n  data_files: rows.jsonl\n---\n",
        "rows.jsonl": b"".join(b'{"text": "row %d", "id": 1}\n' % i for i in range(5)),
    }

    def log_message(self, *_):
        pass

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        path = self.path.split("?")[0]
        name = path.rpartition("/")[2]
        if "/gated" in path:
            self.answer(403, X_Error_Code="GatedRepo")
        elif "/missing" in path:
            self.answer(404, X_Error_Code="RepoNotFound")
        elif path.startswith("/api/datasets/org/name/tree"):
            tree = [
                {"type": "file", "oid": "b" * 40, "size": len(body), "path": file}
                for file, body in self.files.items()
            ]
            self.answer(200, json.dumps(tree).encode())
        elif path.startswith("/api/datasets/org/name"):
            about = {"id": "org/name", "sha": self.commit, "siblings": [], "tags": []}
            self.answer(200, json.dumps(about).encode())
        elif path.startswith("/datasets/org/name/resolve") and name in self.files:
            body = self.files[name]
            headers = {"X_Repo_Commit": self.commit, "ETag": '"c"', "Accept_Ranges": "bytes"}
            if "Range" in self.headers and self.command == "GET":
                first, last = self.headers["Range"].removeprefix("bytes=").split("-")
                last = min(int(last or len(body)), len(body) - 1)
                headers["Content_Range"] = f"bytes {first}-{last}/{len(body)}"
                self.answer(206, body[int(first) : last + 1], **headers)
            else:
                self.answer(200, body, **headers)
        else:
            self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=self.commit)

    do_HEAD = do_GET


READ_ALL = """
import sys
from kvhub.corpus import describe, documents
from kvhub.errors import KVHubError
def texts(data): return list(documents(data))
def wrong_field(data): return list(documents(data, text_field="id"))
for data in sys.argv[1:]:
    for read in (describe, texts, wrong_field):
        try:
            print(read(data))
        except KVHubError as error:
            print(type(error).__name__, error.message)
"""


@pytest.mark.slow
def test_a_dataset_is_streamed_from_the_hub(tmp_path):
    """In a process of its own, because the Hub's address is read when its client is imported."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "0",
        "HF_DATASETS_OFFLINE": "0",
    }
    process = subprocess.run(
        [sys.executable, "-c", READ_ALL, "org/name:small", "org/name:big", "org/missing",
         "org/gated"],
        env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    server.shutdown()
    server.server_close()
    assert process.returncode == 0, process.stderr
    about, rows, wrong_field, *rest = process.stdout.splitlines()
    assert ast.literal_eval(about) == {
        "data": "org/name:small", "kind": "dataset", "split": "train", "revision": "a" * 40,
    }  # fmt: skip
    assert ast.literal_eval(rows) == [f"row {i}" for i in range(5)]
    assert wrong_field.startswith("UsageError org/name, example 0: the field 'id' holds int")
    assert rest[1].startswith("NotFoundError")
    assert "['small']" in rest[1]
    assert all(line.startswith("NotFoundError The dataset org/missing") for line in rest[3:6])
    assert all(line.startswith("AuthError") for line in rest[6:9])


def test_the_held_out_modules_are_those_the_embedded_models_never_saw():
    tree = ast.parse((ROOT / "examples" / "tiny_family" / "train.py").read_text(encoding="utf-8"))
    (value,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "HELD_OUT"
    )
    assert ast.literal_eval(value) == HELD_OUT_MODULES
    held_out = {name.split("/")[0].removesuffix(".py") for name in library_files("stdlib-held-out")}
    assert held_out == set(HELD_OUT_MODULES)


def test_built_in_texts_leave_out_tests_and_what_is_held_out():
    names = set(library_files("stdlib"))
    assert {"ast.py", "json/decoder.py"} <= names
    assert not names & set(library_files("stdlib-held-out"))
    assert not [name for name in names if {"test", "tests"} & set(name.split("/"))]
    text = "".join(library_passages("stdlib", 4096))
    assert "class NodeVisitor" in text
    assert "class ArgumentParser(" not in text


@pytest.mark.parametrize("data", ["stdlib", "stdlib-held-out", "english"])
def test_the_beginning_of_a_built_in_text_is_always_the_same_and_evenly_cut(data):
    first, again = (list(islice(library_passages(data, 1000), 100)) for _ in range(2))
    assert first == again
    assert len(set(first)) == 100
    assert 900 < sum(map(len, first)) / 100 < 1100
    assert max(map(len, first)) < 2000


def test_cutting_into_passages_loses_nothing():
    def characters(length):
        return sorted("".join(library_passages("stdlib-held-out", length)))

    assert characters(500) == characters(10_000)


def test_a_short_prefix_of_the_library_has_many_modules_in_it():
    sources = {name: path.read_text() for name, path in library_files("stdlib-held-out").items()}
    beginning = list(islice(library_passages("stdlib-held-out", 1000), 40))
    seen = {name for name, text in sources.items() for passage in beginning if passage in text}
    assert len(seen) >= 8


def test_english_is_prose():
    text = "".join(islice(library_passages("english", 2000), 50))
    paragraphs = text.split("\n\n")
    assert len(set(paragraphs)) > 0.95 * len(paragraphs)
    assert ">>>" not in text
    assert sum(character.isalpha() or character.isspace() for character in text) > 0.9 * len(text)
    assert sum(f" {word} " in text for word in ("the", "is", "of", "and", "if")) == 5


def calibrated(data, sequences=12, length=24):
    return {**describe(data), "sequences": sequences, "length": length}


def test_evaluation_uses_sequences_that_calibration_did_not(corpus):
    assert evaluation_stream(calibrated("stdlib"), None, 7) == ("stdlib-held-out", 0, 7)
    assert evaluation_stream(calibrated("english")) == ("english", 12, 24)
    # Also where the user names that text again, and wherever its file lies.
    assert evaluation_stream(calibrated("stdlib"), "stdlib") == ("stdlib-held-out", 0, 24)
    assert evaluation_stream(calibrated("stdlib"), "english", 48) == ("english", 0, 48)
    data, start, length = evaluation_stream(calibrated(corpus), corpus)
    tokenizer = word_tokenizer()
    used = sequences_of(token_batches(tokenizer, corpus, sequences=12, length=24))
    fresh = sequences_of(token_batches(tokenizer, data, sequences=12, length=length, start=start))
    assert len(fresh) == 12
    assert not used.keys() & fresh.keys()


def test_text_that_calibration_may_have_seen_is_refused(corpus):
    with pytest.raises(UsageError, match=r"sequences of 24 tokens.*of 12 tokens"):
        evaluation_stream(calibrated("english"), None, 12)
    with pytest.raises(UsageError, match="does not record where local"):
        evaluation_stream(calibrated(corpus))
    one, two = calibrated("english"), calibrated(corpus)
    merged = {**one, "data": [one["data"], two["data"]], "sha256": [one["sha256"], two["sha256"]]}
    for data in ("english", corpus):
        with pytest.raises(UsageError, match="cannot be told"):
            evaluation_stream(merged, data)
    assert evaluation_stream(merged, "stdlib") == ("stdlib", 0, 24)


def test_provenance_identifies_a_text_and_hides_where_it_lay(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "b.txt").write_text("b")
        (tmp_path / name / "sub" / "a.md").write_text("a")
    one, two = (describe(str(tmp_path / name)) for name in ("one", "two"))
    digests = {"b.txt": hashlib.sha256(b"b"), "sub/a.md": hashlib.sha256(b"a")}
    lines = "".join(f"{digest.hexdigest()}  {name}\n" for name, digest in digests.items())
    sha256 = hashlib.sha256(lines.encode()).hexdigest()
    assert one == {"data": "one", "kind": "files", "files": 2, "size_bytes": 2, "sha256": sha256}
    assert two == {**one, "data": "two"}
    (tmp_path / "two" / "b.txt").write_text("c")
    assert describe(str(tmp_path / "two"))["sha256"] != sha256
    single = describe(str(tmp_path / "two" / "b.txt"))
    assert single["sha256"] == hashlib.sha256(b"c").hexdigest()
    assert str(tmp_path) not in json.dumps([one, two, single])


def test_provenance_of_built_in_texts_has_the_python_version():
    found = {data: describe(data) for data in ("stdlib", "stdlib-held-out", "english")}
    assert len({about["sha256"] for about in found.values()}) == 3
    for data, about in found.items():
        assert about["data"] == data
        assert about["kind"] == "built-in"
        assert about["python"] == ".".join(map(str, sys.version_info[:3]))
        assert about["files"] >= len(HELD_OUT_MODULES)
