import hashlib
import os
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lockstep.data.download import download
from lockstep.kernel.errors import FileError

BODY = random.Random(0).randbytes(700_000)
SHA256 = hashlib.sha256(BODY).hexdigest()


class Mirror:
    """A server on 127.0.0.1 that answers by the first part of the path, and counts."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.released = threading.Event()
        mirror = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                mirror.asked.append(self.path)
                kind = self.path.split("/")[1]
                if kind == "missing":
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(BODY)))
                self.end_headers()
                self.wfile.write(BODY[: 1000 if kind in ("short", "silent") else len(BODY)])
                if kind == "silent":
                    self.wfile.flush()
                    mirror.released.wait(30)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def url(self, kind: str) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/{kind}/"

    def close(self) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    server = Mirror()
    yield server
    server.close()


def test_a_file_arrives_whole_and_alone(tmp_path: Path, mirror: Mirror) -> None:
    seen: list[tuple[str, int, int | None]] = []
    folder = tmp_path / "new" / "folder"
    path = download("a.gz", folder, SHA256, [mirror.url("good")], lambda *news: seen.append(news))
    assert path.read_bytes() == BODY
    assert os.listdir(folder) == ["a.gz"]
    assert seen[-1] == ("a.gz", len(BODY), len(BODY))
    assert [size for _, size, _ in seen] == sorted(size for _, size, _ in seen)


def test_a_file_that_is_there_is_not_fetched(tmp_path: Path, mirror: Mirror) -> None:
    (tmp_path / "a.gz").write_bytes(b"mine")
    assert download("a.gz", tmp_path, SHA256, [mirror.url("good")]).read_bytes() == b"mine"
    assert mirror.asked == []


def test_the_second_mirror_serves_where_the_first_fails(tmp_path: Path, mirror: Mirror) -> None:
    mirrors = [mirror.url(kind) for kind in ("missing", "short", "good")]
    assert download("a.gz", tmp_path, SHA256, mirrors).read_bytes() == BODY
    assert mirror.asked == ["/missing/a.gz", "/short/a.gz", "/good/a.gz"]


@pytest.mark.parametrize(
    ("kind", "sha256", "words"),
    [
        ("missing", SHA256, "answered 404 Not Found"),
        ("short", SHA256, "stopped after 1000 of 700000 bytes"),
        ("silent", SHA256, r"failed \(.*timed out\)"),
        ("good", "0" * 64, rf"whose SHA-256 is {SHA256[:12]}\.\.\., not 000000000000\.\.\."),
    ],
)
def test_what_a_mirror_answered_is_told(
    tmp_path: Path, mirror: Mirror, kind: str, sha256: str, words: str
) -> None:
    with pytest.raises(FileError, match=rf"^cannot download a\.gz: http://.*{words}") as caught:
        download("a.gz", tmp_path, sha256, [mirror.url(kind)], stall=0.3)
    assert str(tmp_path) in str(caught.value)
    assert mirror.asked == [f"/{kind}/a.gz"]
    assert os.listdir(tmp_path) == []


def test_the_deadline_bounds_the_whole(tmp_path: Path, mirror: Mirror) -> None:
    with pytest.raises(FileError, match=r"was too slow: .* bytes before the deadline"):
        download("a.gz", tmp_path, SHA256, [mirror.url("good")], deadline=0)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match=r"cannot write .*a\.gz: (File exists|Not a directory)"):
        download("a.gz", tmp_path / "file", SHA256, [])
