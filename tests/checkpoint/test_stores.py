"""The contract of stores, run on each of them; object stores against a real S3 API that is made to fail."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from laminar.checkpoint import Store, collect_garbage, last_sequence, latest_valid, open_store
from laminar.checkpoint.store import objects
from laminar.checkpoint.store.local import LocalStore
from laminar.checkpoint.store.memory import MemoryStore
from laminar.checkpoint.store.protocol import MissingKeyError
from laminar.errors import CheckpointError, StorageError
from tests.support.s3_server import Flaky, s3_server
from tests.support.stored_states import assert_holds, save_arrays, small_state


@pytest.fixture(scope="module")
def s3() -> Iterator[Flaky]:
    with pytest.MonkeyPatch.context() as patch, s3_server(patch) as app:
        yield app


@pytest.fixture(params=["local", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return LocalStore(tmp_path / "store")
    if request.param == "memory":
        return MemoryStore()
    request.getfixturevalue("s3")
    return open_store(f"s3://bucket/{tmp_path.name.replace('_', '-')}")


def test_bytes_come_back(store: Store) -> None:
    """Whole, and any stretch of them; no bytes are bytes too."""
    store.put("a/b", b"0123456789")
    store.put("a/empty", b"")
    assert store.read("a/b") == b"0123456789" and store.read("a/b", 3, 4) == b"3456" and store.size("a/b") == 10
    assert store.read("a/b", 8) == b"89" and store.read("a/empty") == b"" and store.read("a/b", 2, 0) == b""
    store.put("a/b", b"new")
    assert store.read("a/b") == b"new"


def test_what_is_not_there_is_said(store: Store) -> None:
    """And what ends early, which is another thing."""
    store.put("a/b", b"0123")
    for call in (store.read, store.size, lambda key: store.read(key, 0, 2)):
        with pytest.raises(MissingKeyError):
            call("a/c")
    for start, length in ((0, 5), (3, 2), (4, 1), (9, 1)):
        with pytest.raises(CheckpointError, match="ends early"):
            store.read("a/b", start, length)
    store.delete("a/c")
    assert store.list("nothing") == []


def test_keys_are_listed_by_folder(store: Store) -> None:
    """With sizes and ages, sorted; a folder whose name begins alike is another one."""
    for key in ("a/c", "a/b/1", "ab/x", "a/b2"):
        store.put(key, key.encode())
    found = store.list("a")
    assert [(f.key, f.size) for f in found] == [("a/b/1", 5), ("a/b2", 4), ("a/c", 3)]
    assert max(f.modified_s for f in found) - min(f.modified_s for f in found) < 60
    store.delete("a/c")
    assert [f.key for f in store.list("a")] == ["a/b/1", "a/b2"]


def test_a_new_key_is_given_once(store: Store) -> None:
    """Of many that want it at a time, one gets it, and its bytes are there."""
    won: list[int] = []

    def want(i: int) -> None:
        if store.put_new("refs/1", b"%d" % i * 1000):
            won.append(i)

    threads = [threading.Thread(target=want, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(won) == 1 and store.read("refs/1") == b"%d" % won[0] * 1000


def test_an_upload_is_seen_whole_or_not(store: Store) -> None:
    """Not before it is committed, and never if it is given up."""
    upload = store.upload("packs/1")
    data = bytearray(b"x" * (9 << 20))
    upload.write(data)
    data[:] = b"y" * len(data)  # what was written is not what becomes of the buffer
    upload.write(b"end")
    assert store.list("packs") == []
    upload.commit()
    upload.abort()
    assert store.size("packs/1") == (9 << 20) + 3 and store.read("packs/1", (9 << 20) - 1) == b"xend"
    other = store.upload("packs/2")
    other.write(bytes(20 << 20))
    other.abort()
    assert [f.key for f in store.list("packs")] == ["packs/1"]
    small = store.upload("packs/3")
    small.commit()
    assert store.read("packs/3") == b""


@pytest.mark.parametrize(
    "key", ["", "/etc/passwd", "../x", "a/../b", "a//b", "A", "a/.b", "a b", "a/", "x" * 300, "a\0b"]
)
def test_other_keys_are_refused(store: Store, key: str) -> None:
    """No key leads out of a store, or means something else elsewhere."""
    for call in (store.read, store.size, store.delete, store.upload, lambda k: store.put(k, b"")):
        with pytest.raises(StorageError, match="no key of a store"):
            call(key)


def test_a_state_is_saved_and_collected(store: Store) -> None:
    """The whole way, on each of them."""
    state = small_state()
    ref = save_arrays(store, state)
    assert_holds(store, ref, state)
    assert not collect_garbage(store).packs
    assert_holds(store, ref, state)
    store.delete(ref.key)
    assert collect_garbage(store).packs


# --- local -------------------------------------------------------------------------------------------


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    """Weights and hyper-parameters are nobody else's business, whatever the umask."""
    old = os.umask(0)
    try:
        save_arrays(LocalStore(tmp_path / "s"), small_state())
    finally:
        os.umask(old)
    paths = list((tmp_path / "s").rglob("*"))
    assert {oct(p.stat().st_mode & 0o777) for p in paths if p.is_file()} == {"0o600"}
    assert {oct(p.stat().st_mode & 0o777) for p in paths if p.is_dir()} == {"0o700"}


def test_no_symlink_is_followed_out_of_a_store(tmp_path: Path) -> None:
    """Neither as a folder nor as a file, neither to read nor to write nor to remove."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    store = LocalStore(tmp_path / "s")
    store.put("packs/a", b"a")
    (tmp_path / "s" / "refs").symlink_to(outside)
    (tmp_path / "s" / "packs" / "link").symlink_to(outside / "secret")
    with pytest.raises(CheckpointError):
        store.read("packs/link")
    for call in (store.read, store.delete, lambda k: store.put(k, b"x"), lambda k: store.put_new(k + "2", b"x")):
        with pytest.raises(CheckpointError):
            call("refs/secret")
    with pytest.raises(StorageError):
        store.list("refs")
    assert [p.name for p in outside.iterdir()] == ["secret"] and (outside / "secret").read_bytes() == b"secret"


def test_a_file_system_without_hard_links_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as one that can't be written."""

    def link(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(StorageError, match="without hard links"):
        LocalStore(tmp_path).put_new("a", b"")


def test_what_is_no_plain_file_is_not_read(tmp_path: Path) -> None:
    """A pipe would keep its reader for ever."""
    store = LocalStore(tmp_path)
    store.put("packs/a", b"a")
    os.mkfifo(tmp_path / "packs" / "pipe")
    with pytest.raises(CheckpointError, match="no plain file"):
        store.read("packs/pipe")


# --- object stores -----------------------------------------------------------------------------------


def test_what_fails_for_a_while_is_tried_again(s3: Flaky, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third request is answered with 503 or 500: a save and its reading come through."""
    count = 0

    def often(method: str, path: str) -> str | None:
        nonlocal count
        count += 1
        return {0: "503 Slow Down", 3: "500 Internal Server Error"}.get(count % 6)

    monkeypatch.setattr(s3, "fail", often)
    store, state = open_store("s3://bucket/flaky"), small_state()
    ref = save_arrays(store, state)
    assert_holds(store, ref, state)
    assert s3.failed > 5


def test_a_lost_answer_to_a_conditional_put_is_understood(s3: Flaky, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is there though the service said 500: it is ours, and the save has succeeded."""
    lost = iter(["lost"])
    monkeypatch.setattr(
        s3, "fail", lambda method, path: next(lost, None) if "/refs/" in path and method == "PUT" else None
    )
    store, state = open_store("s3://bucket/lost"), small_state()
    ref = save_arrays(store, state)
    assert_holds(store, ref, state)
    assert next(lost, None) is None


def test_a_service_that_does_not_answer_is_asked_again(s3: Flaky, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request for a key hangs for longer than anyone waits."""
    monkeypatch.setattr(objects, "REQUEST_TIMEOUT_S", 0.5)
    hang = iter([1.5])

    def slow(method: str, path: str) -> None:
        time.sleep(next(hang, 0) if method == "PUT" else 0)

    monkeypatch.setattr(s3, "fail", slow)
    store = open_store("s3://bucket/slow")
    store.put("a", b"there")
    assert store.read("a") == b"there" and next(hang, None) is None


def test_an_upload_that_is_given_up_leaves_no_parts(s3: Flaky) -> None:
    """They would be invisible, and paid for."""
    import boto3

    store = open_store("s3://bucket/parts")
    upload = store.upload("a")
    for _ in range(8):
        upload.write(bytes(5 << 20))
    upload.abort()
    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"], region_name="us-east-1")
    assert not client.list_multipart_uploads(Bucket="bucket").get("Uploads") and not store.list("a")


def test_what_keeps_failing_is_said(s3: Flaky, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the store's name, and without waiting for minutes."""
    monkeypatch.setattr(objects, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(objects, "CALL_ATTEMPTS", 2)
    monkeypatch.setattr(s3, "fail", lambda method, path: "503 Slow Down")
    with pytest.raises(StorageError, match="s3://bucket/down can't be written"):
        open_store("s3://bucket/down").put("a", b"")
    with pytest.raises(StorageError, match="s3://bucket/down can't be written"):
        upload = open_store("s3://bucket/down").upload("a")
        upload.write(bytes(1 << 20))
        upload.commit()


@pytest.mark.slow
@pytest.mark.parametrize("lost", [False, True], ids=["refused", "answer lost"])
def test_a_service_that_goes_at_any_request_leaves_old_or_new(
    s3: Flaky, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """From each request of a save on, all fail; the first may have done its work. When it is back, all is well."""
    for name, value in (("FIRST_PAUSE_S", 0.0), ("CALL_ATTEMPTS", 1), ("REQUEST_RETRIES", 0)):
        monkeypatch.setattr(objects, name, value)
    old, new, count, last = small_state(1), small_state(9), 0, 0

    def fail(method: str, path: str) -> str | None:
        nonlocal count
        count += 1
        if not last or count < last:
            return None
        return "lost" if lost and count == last else "503 Slow Down"

    monkeypatch.setattr(s3, "fail", fail)
    probe = open_store(f"s3://bucket/probe-{lost}".lower())
    first = save_arrays(probe, old)
    count = 0
    save_arrays(probe, new, after=1, step=1, parent=first)
    requests = count
    assert requests > 10
    for at in range(1, requests + 1):
        store = open_store(f"s3://bucket/cut-{lost}-{at}".lower())
        first = save_arrays(store, old)
        count, last = 0, at
        with contextlib.suppress(StorageError):
            save_arrays(store, new, after=1, step=1, parent=first)
        last = 0
        found = latest_valid(store, "run")
        assert found.ref is not None and not found.passed_over and not found.damaged_refs
        assert_holds(store, found.ref, old if found.ref == first else new)
        again = save_arrays(store, new, after=last_sequence(store, "run"), step=2)
        assert_holds(store, again, new)


def test_a_bucket_that_is_not_there(s3: Flaky) -> None:
    """Is an error with the next thing to do."""
    with pytest.raises(StorageError) as found:
        save_arrays(open_store("s3://no-such-bucket/x"), small_state())
    assert "next" in found.value.lines


@pytest.mark.parametrize(
    "uri", ["ftp://host/x", "s3://", "s3://user@bucket/x", "s3://bucket?x=1", "file://host/path", "http://bucket/x"]
)
def test_other_places_are_refused(uri: str) -> None:
    """By name."""
    with pytest.raises(StorageError):
        open_store(uri)


def test_places_are_told_by_their_names(tmp_path: Path) -> None:
    """A path, a path as a URI, and memory that is shared within a process."""
    open_store(tmp_path / "a").put("x", b"1")
    assert open_store(f"file://{tmp_path}/a").read("x") == b"1"
    open_store("memory://here").put("x", b"2")
    assert open_store("memory://here").read("x") == b"2"
