"""A store in a bucket: S3 and what speaks its language, Google Cloud Storage, Azure, through the package `obstore`.

A new key is a conditional put, so of two writers one is told. Large uploads are sent in parts while they are made; one
that is given up is taken back by the service. Calls that fail for a while (5xx, dropped connections, timeouts) are
tried again: each request by obstore, and each call as a whole here, as all of them may be repeated. Credentials and
endpoints are those of the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS, ...).

Parts of an upload whose process was killed are invisible. A life-cycle rule of the bucket removes them, which has to be
set there: they are not listed here.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType
from typing import TypeVar

from laminar.checkpoint.format.hashing import Content
from laminar.checkpoint.store.protocol import MissingKeyError, StoredFile, checked_key, missing_key, short_read
from laminar.errors import StorageError

OBJECT_SCHEMES = ("s3", "gs", "az")
CALL_ATTEMPTS = 4
FIRST_PAUSE_S = 0.2
"""Before a call is tried again; each further pause is twice as long, and drawn so that writers don't come at once."""
REQUEST_TIMEOUT_S = 60
REQUEST_RETRIES = 4
PART_BYTES = 8 << 20
"""Of a large upload; at most two wait in memory."""
Answered = TypeVar("Answered")


def _obstore() -> ModuleType:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError:
        raise StorageError(
            "object stores are reached through the package obstore, which is not installed",
            next="pip install 'laminar-train[cloud]'",
        ) from None
    return obstore


class ObjectStore:
    """Bytes in objects of a bucket."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._lib = _obstore()
        self._known = self._lib.exceptions
        try:
            self._bucket = self._lib.store.from_url(
                uri,
                client_options={"timeout": timedelta(seconds=REQUEST_TIMEOUT_S), "allow_http": True},
                retry_config={"max_retries": REQUEST_RETRIES, "retry_timeout": timedelta(seconds=REQUEST_TIMEOUT_S)},
            )
        except (self._known.BaseError, ValueError) as error:
            raise self._failed(error, "opened") from error

    def _failed(self, error: BaseException, what: str) -> StorageError:
        said = str(error).strip().partition("\n")[0][:300]
        hint = "check the bucket's name, its endpoint and the credentials in the environment"
        return StorageError(f"{self.uri} can't be {what}: {type(error).__name__}: {said}", next=hint)

    def _tried(self, call: Callable[[], Answered], key: str, what: str) -> Answered:
        """What a call gives, tried again where that may help."""
        exceptions = self._known
        for attempt in range(CALL_ATTEMPTS):
            try:
                return call()
            except (exceptions.NotFoundError, FileNotFoundError) as error:
                if what == "written":  # then it is the bucket that is not there
                    raise self._failed(error, what) from error
                raise missing_key(key, self.uri) from None
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
                raise
            except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
                raise self._failed(error, what) from error
            except (exceptions.BaseError, OSError) as error:
                if attempt == CALL_ATTEMPTS - 1:
                    raise self._failed(error, what) from error
            time.sleep(FIRST_PAUSE_S * 2**attempt * random.uniform(0.5, 1))
        raise AssertionError("not reached")

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """See `Store`."""
        checked_key(key)
        if length is None:
            whole = self._tried(lambda: bytes(self._lib.get(self._bucket, key).bytes()), key, "read")
            if start > len(whole):
                raise short_read(key, self.uri, len(whole), start)
            return whole[start:]
        if length == 0:
            return b""
        try:
            found = self._tried(
                lambda: bytes(self._lib.get_range(self._bucket, key, start=start, length=length)), key, "read"
            )
        except StorageError as error:
            size = self.size(key)  # some services refuse ranges that begin behind the end
            if start + length > size:
                raise short_read(key, self.uri, size, start + length) from error
            raise
        if len(found) != length:
            raise short_read(key, self.uri, start + len(found), start + length)
        return found

    def size(self, key: str) -> int:
        """See `Store`."""
        checked_key(key)
        return int(self._tried(lambda: self._lib.head(self._bucket, key), key, "read")["size"])

    def list(self, prefix: str) -> list[StoredFile]:
        """See `Store`."""
        checked_key(prefix)

        def listed() -> list[StoredFile]:
            chunks = self._lib.list(self._bucket, prefix=prefix + "/")
            return [StoredFile(o["path"], o["size"], o["last_modified"].timestamp()) for some in chunks for o in some]

        return sorted(self._tried(listed, prefix, "listed"), key=lambda file: file.key)

    def put(self, key: str, data: bytes) -> None:
        """See `Store`."""
        checked_key(key)
        self._tried(lambda: self._lib.put(self._bucket, key, data), key, "written")

    def put_new(self, key: str, data: bytes) -> bool:
        """See `Store`. Where an answer was lost, a key that has just these bytes counts as put."""
        checked_key(key)
        calls = 0

        def put() -> None:
            nonlocal calls
            calls += 1
            self._lib.put(self._bucket, key, data, mode="create")

        try:
            self._tried(put, key, "written")
        except (self._known.AlreadyExistsError, self._known.PreconditionError):
            return calls > 1 and self.read(key) == data
        return True

    def upload(self, key: str) -> ObjectUpload:
        """See `Store`."""
        return ObjectUpload(self, self._send, checked_key(key))

    def _send(self, key: str, parts: Iterator[bytes]) -> None:
        """Upload what comes; an error of `parts` takes it back."""
        self._lib.put(self._bucket, key, parts, chunk_size=PART_BYTES, max_concurrency=2)

    def failed_upload(self, error: BaseException, key: str) -> StorageError:
        """The error that an upload did not come through."""
        return self._failed(error, f"written ({key})")

    def delete(self, key: str) -> None:
        """See `Store`."""
        checked_key(key)
        with contextlib.suppress(MissingKeyError):
            self._tried(lambda: self._lib.delete(self._bucket, key), key, "removed")

    def clean(self, older_than_s: float) -> int:
        """Services remove the parts of given-up uploads themselves."""
        return 0


class _GivenUp(Exception):
    """An upload is not wanted any more."""


class ObjectUpload:
    """Parts handed to a thread that sends them."""

    def __init__(self, store: ObjectStore, send: Callable[[str, Iterator[bytes]], None], key: str) -> None:
        self._store, self._send, self._key = store, send, key
        self._buffer = bytearray()
        self._parts: queue.Queue[bytes | _GivenUp | None] = queue.Queue(1)
        self._error: BaseException | None = None
        self._heard_all = False
        self._thread = threading.Thread(target=self._run, name="laminar upload", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._send(self._key, self._listed())
        except BaseException as error:
            self._error = error
            while not self._heard_all:  # whoever hands over parts must not wait for ever
                self._heard_all = not isinstance(self._parts.get(), bytes)

    def _listed(self) -> Iterator[bytes]:
        while isinstance(part := self._parts.get(), bytes):
            yield part
        self._heard_all = True
        if part is not None:
            raise part

    def write(self, data: Content) -> None:
        """See `Upload`."""
        self._buffer += data
        if len(self._buffer) >= PART_BYTES:
            self._check()
            self._parts.put(bytes(self._buffer))
            self._buffer.clear()

    def _check(self) -> None:
        if self._error is not None:
            raise self._store.failed_upload(self._error, self._key) from self._error

    def commit(self) -> None:
        """See `Upload`."""
        if self._buffer:
            self._parts.put(bytes(self._buffer))
        self._parts.put(None)
        self._thread.join()
        self._check()

    def abort(self) -> None:
        """See `Upload`."""
        if self._thread.is_alive():
            self._parts.put(_GivenUp())
            self._thread.join()
