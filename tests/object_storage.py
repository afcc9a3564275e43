"""An S3 server on the loopback for tests (moto), and a proxy before it that injects faults.

moto keeps all objects in its process, so the server lives as long as the test process and survives
the workers that a test kills.
"""

import http.client
import logging
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from uuid import uuid4

from densefeed.system.object_store import open_bucket
from densefeed.system.object_url import ObjectURL

SECRET = "a-secret-that-no-message-may-hold"


class S3Server:
    """moto's server in a thread of this process."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer
        from werkzeug.serving import WSGIRequestHandler

        # Else each reply takes 40 ms, until its header is acknowledged.
        WSGIRequestHandler.disable_nagle_algorithm = True
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
        self._server.start()
        web, uploading = self._server._server, threading.Lock()

        def answer(environ, start_response, app=web.app):
            # moto looks for an object, then stores it: of two uploads on condition that there is
            # none, both may succeed, which S3 does not allow.
            with uploading if environ["REQUEST_METHOD"] == "PUT" else nullcontext():
                return app(environ, start_response)

        web.app = answer
        self.port = self._server.get_host_and_port()[1]
        self.stop = self._server.stop

    def make_bucket(self) -> ObjectURL:
        """Create an empty bucket."""
        bucket = ObjectURL(f"s3://bucket-{uuid4().hex}")
        self.request("PUT", bucket)
        return bucket

    def remove_bucket(self, bucket: ObjectURL) -> None:
        """Remove a bucket that is empty."""
        self.request("DELETE", bucket)

    def request(
        self, method: str, url: ObjectURL, body: bytes = b"", headers: dict | None = None
    ) -> None:
        """Send a request past the proxies of the environment."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request(method, url.removeprefix("s3:/"), body, headers or {})
        assert connection.getresponse().status < 300
        connection.close()


def point_to(port: int) -> None:
    """Let this process, and those that it starts, use the server at a port of the loopback."""
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    # Stores that are open keep the settings of before.
    open_bucket.cache_clear()


# ------------------------------------------------------------------------------------------ faults

# Replies of S3 by the name of a fault.
REPLIES = {
    "InternalError": 500,
    "SlowDown": 503,
    "NoSuchBucket": 404,
    "ExpiredToken": 400,
    "RequestTimeTooSkewed": 403,
    "AccessDenied": 403,
}
# Choose the fault of a request by its method, path and number; "" for none.
Choose = Callable[[str, str, int], str]


class FaultProxy(ThreadingHTTPServer):
    """A proxy before an S3 server: `choose` names the fault of each request.

    Beside those of REPLIES: `late` (20 to 500 ms), `lost` (a request is executed, without a reply),
    `cut` (half the body of the reply), `half` (half the body of an upload is stored) and `stale`
    (a list as it was before).
    """

    daemon_threads = True
    # A kill of a client in the middle of a request is expected.
    handle_error = staticmethod(lambda *_: None)

    def __init__(self, server: S3Server, choose: Choose) -> None:
        super().__init__(("127.0.0.1", 0), FaultHandler)
        self.target, self.choose, self.faults = server.port, choose, Counter()
        self.lists: dict[str, tuple] = {}
        self.lock, self.requests = threading.Lock(), 0
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def port(self) -> int:
        return self.server_address[1]


class FaultHandler(BaseHTTPRequestHandler):
    """Forward a request, with its fault."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    log_message = staticmethod(lambda *_: None)

    def forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.server.lock:
            self.server.requests += 1
            fault = self.server.choose(self.command, self.path, self.server.requests)
            self.server.faults[fault] += 1
        if fault in REPLIES:
            content = f"<Error><Code>{fault}</Code><Id>{SECRET}</Id></Error>".encode()
            return self.reply(REPLIES[fault], {}, content)
        if fault == "late":
            time.sleep(random.uniform(0.02, 0.5))
        answer = self.ask(body[: len(body) // 2] if fault == "half" else body)
        if "list-type" in self.path:
            before = self.server.lists.get(self.path, answer)
            self.server.lists[self.path] = answer
            answer = before if fault == "stale" else answer
        if fault == "lost":
            return self.hang_up()
        self.reply(*answer, cut=fault == "cut")

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward  # noqa: N815

    def ask(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Send the request to the server; return status, headers and body of its reply."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.target, timeout=30)
        headers = dict(self.headers) | {"Content-Length": str(len(body))}
        connection.request(self.command, self.path, body, headers)
        response = connection.getresponse()
        answer = response.status, dict(response.getheaders()), response.read()
        connection.close()
        return answer

    def reply(self, status: int, headers: dict[str, str], body: bytes, cut: bool = False) -> None:
        self.send_response_only(status)
        length = headers.get("Content-Length", len(body)) if self.command == "HEAD" else len(body)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.hang_up()

    def hang_up(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


def cycle_faults(every: int, *names: str) -> Choose:
    """Choose the next of the faults for every so many requests.

    So all of them occur, and none so often in a row that all attempts at a request fail.
    """

    def choose(method: str, path: str, number: int) -> str:
        return "" if number % every else names[number // every % len(names)]

    return choose


def run_with(environment: dict[str, str], work: Callable[..., object], *words: object) -> None:
    """Call `work` with these variables in the environment.

    For the children of a fork server, which have the environment that was there when it started,
    perhaps for another test.
    """
    os.environ.update(environment)
    work(*words)
