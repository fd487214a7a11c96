"""A real S3 API on loopback, which can be told to fail: moto behind a server of werkzeug."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


class Flaky:
    """A WSGI application that answers the next few requests of some kind with an error of the server."""

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self.app = app
        self.fail: Callable[[str, str], str | None] = lambda method, path: None
        """What a request is answered with; "lost" carries it out and then says 500."""
        self.failed = 0

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        status = self.fail(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        if status is None:
            return self.app(environ, start)
        self.failed += 1
        if status == "lost":
            list(self.app(environ, lambda *_: None))
            status = "500 Internal Server Error"
        else:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start(status, [("Content-Length", "0")])
        return [b""]


@contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch, bucket: str = "bucket") -> Iterator[Flaky]:
    """The environment leads to it, and the bucket is there."""
    pytest.importorskip("moto", reason="moto is the S3 API of these tests")
    pytest.importorskip("flask", reason="moto's server needs flask")
    pytest.importorskip("obstore", reason="object stores are reached through obstore")
    import boto3
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = Flaky(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}",
    }.items():
        monkeypatch.setenv(name, value)

    boto3.client("s3", endpoint_url=f"http://127.0.0.1:{server.port}", region_name="us-east-1").create_bucket(
        Bucket=bucket
    )
    try:
        yield app
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
