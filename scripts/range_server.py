"""A web server of files with range requests, which waits before each response, for measurements of remote reading.

    python scripts/range_server.py FOLDER --port 8123 --latency 0.03 --bandwidth 100 --faults 0.05

Each response is delayed by the latency, and all responses share the bandwidth, in MB/s; ``--connection`` limits that of
each connection. A fraction ``--faults`` of the requests gets status 503, a truncated body or a late body. ``--log``
names a file to which the range of each request is added: path, start and end. Prints the URL. Files are sent with
sendfile, so the server needs little processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import time
from email.utils import formatdate
from pathlib import Path
from typing import TextIO


class RangeServer:
    """Serve the files of a folder."""

    def __init__(
        self,
        folder: Path,
        latency_s: float,
        bandwidth: float,
        faults: float,
        connection: float = 0.0,
        log: TextIO | None = None,
    ) -> None:
        self._folder, self._latency_s, self._faults, self._log = folder, latency_s, faults, log
        self._s_per_byte, self._free_at = 1e-6 / bandwidth if bandwidth else 0.0, 0.0
        self._connection_s_per_byte = 1e-6 / connection if connection else 0.0
        self._random = random.Random(0)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        try:
            while request := await reader.readuntil(b"\r\n\r\n"):
                await asyncio.sleep(self._latency_s)
                if not await self._answer(request.decode("latin-1"), writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, request: str, writer: asyncio.StreamWriter) -> bool:
        method, target, _ = request.split(" ", 2)
        path = self._folder / target.lstrip("/")
        if ".." in target or not path.is_file():
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return True
        fault = random.choice(("503", "short", "slow")) if self._random.random() < self._faults else ""
        if fault == "503":
            writer.write(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n")
            return True
        status = path.stat()
        match = re.search(r"(?mi)^range: *bytes=(\d+)-(\d*)", request)
        start, stop = 0, status.st_size
        if match:
            start, stop = int(match[1]), min(stop, int(match[2] or stop) + 1)
        lines = [
            "HTTP/1.1 206 Partial Content" if match else "HTTP/1.1 200 OK",
            f"Content-Length: {stop - start}",
            f'ETag: "{status.st_mtime_ns:x}-{status.st_size:x}"',
            f"Last-Modified: {formatdate(status.st_mtime, usegmt=True)}",
            "Accept-Ranges: bytes",
            *([f"Content-Range: bytes {start}-{stop - 1}/{status.st_size}"] if match else []),
        ]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        if method == "HEAD":
            return True
        if fault == "slow":
            await asyncio.sleep(1)
        if self._log is not None:
            self._log.write(f"{target} {start} {stop}\n")
        now = time.perf_counter()
        self._free_at = max(now, self._free_at) + (stop - start) * self._s_per_byte
        await asyncio.sleep(max(self._free_at - now, (stop - start) * self._connection_s_per_byte))
        with path.open("rb") as file:
            count = (stop - start) // 2 if fault == "short" else stop - start
            await writer.drain()
            await asyncio.get_running_loop().sendfile(writer.transport, file, start, count)
        return fault != "short"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--latency", type=float, default=0.03, help="seconds before each answer")
    parser.add_argument("--bandwidth", type=float, default=0.0, help="of all answers, in MB/s; 0: no limit")
    parser.add_argument("--connection", type=float, default=0.0, help="of each connection, in MB/s; 0: no limit")
    parser.add_argument("--log", type=Path, help="file to which the ranges of all requests are added")
    parser.add_argument("--faults", type=float, default=0.0, help="part of the requests that fail")
    args = parser.parse_args()
    log = args.log.open("a", buffering=1) if args.log else None
    served = RangeServer(args.folder, args.latency, args.bandwidth, args.faults, args.connection, log)
    server = await asyncio.start_server(served.serve, "127.0.0.1", args.port, backlog=1024)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
