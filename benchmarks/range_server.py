"""Serve the files of a folder on the loopback as S3 does: HEAD and GET of a range, after a delay.

    python -m benchmarks.range_server FOLDER --latency 20

It prints its port, and ends when its standard input is closed. Files are in any bucket, under their
names. A request takes 0.1 ms of a core.
"""

import asyncio
import mmap
import re
import sys
from dataclasses import dataclass
from email.utils import formatdate
from functools import partial
from pathlib import Path

import tyro

RANGE = re.compile(rb"\r\nrange: bytes=(\d+)-(\d+)", re.I)


class Connection(asyncio.Protocol):
    """A connection of a client, which sends one request after another."""

    def __init__(self, files: dict[bytes, mmap.mmap], seconds: float) -> None:
        self._files, self._seconds, self._received = files, seconds, b""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport, self._loop = transport, asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        """Answer every complete request; those of this server have no bodies."""
        *requests, self._received = (self._received + data).split(b"\r\n\r\n")
        for request in requests:
            self._loop.call_later(self._seconds, self._answer, request)

    def _answer(self, request: bytes) -> None:
        method, path, _ = request.split(b" ", 2)
        content = self._files.get(path.rpartition(b"/")[2].partition(b"?")[0])
        if content is None:
            self._transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return
        size = len(content)
        found = RANGE.search(request)
        first, last = (int(found[1]), min(int(found[2]), size - 1)) if found else (0, size - 1)
        status = f"206 Partial Content\r\nContent-Range: bytes {first}-{last}/{size}"
        header = (
            f"HTTP/1.1 {status if found else '200 OK'}\r\nContent-Length: {last + 1 - first}\r\n"
            f'ETag: "{size}"\r\nLast-Modified: {formatdate(0, usegmt=True)}\r\n\r\n'
        )
        body = b"" if method == b"HEAD" else content[first : last + 1]
        self._transport.write(header.encode() + body)


@dataclass(frozen=True, kw_only=True)
class RangeServer:
    """Options of this server."""

    folder: tyro.conf.Positional[Path]  # the files served
    latency: float = 20.0  # before an answer, ms


async def serve(server: RangeServer) -> None:
    """Serve until standard input is closed."""
    files = {}
    for path in filter(Path.is_file, server.folder.iterdir()):
        with open(path, "rb") as file:
            files[path.name.encode()] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    loop = asyncio.get_running_loop()
    answer = partial(Connection, files, server.latency / 1e3)
    listening = await loop.create_server(answer, "127.0.0.1", 0)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(tyro.cli(RangeServer, description=__doc__)))
