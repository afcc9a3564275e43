"""An S3 server on the loopback for tests (moto), and what its clients need.

moto keeps all objects in its process, so the server lives as long as the test process and survives
the workers that a test kills.
"""

import http.client
import logging
import os
from uuid import uuid4

from densefeed.system.object_store import ObjectURL, open_bucket

SECRET = "a-secret-that-no-message-may-hold"


class S3Server:
    """moto's server in a thread of this process."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
        self._server.start()
        self.port = self._server.get_host_and_port()[1]
        self.stop = self._server.stop

    def make_bucket(self) -> ObjectURL:
        """Create an empty bucket."""
        name = f"bucket-{uuid4().hex}"
        self.request("PUT", f"/{name}")
        return ObjectURL(f"s3://{name}")

    def remove_bucket(self, bucket: ObjectURL) -> None:
        """Remove a bucket that is empty."""
        self.request("DELETE", f"/{bucket.removeprefix('s3://')}")

    def request(self, method: str, path: str) -> None:
        """Send a request without a body, past the proxies of the environment."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request(method, path)
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
