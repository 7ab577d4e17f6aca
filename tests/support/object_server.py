"""A web server of objects in memory, in threads: with range requests, latency, and faults on demand."""

from __future__ import annotations

import hashlib
import random
import re
import threading
import time
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote

from h5chunk.remote import client

KINDS = ("503", "short", "slow")


class ObjectServer(ThreadingHTTPServer):
    """``objects`` maps paths such as ``/a.h5`` to bytes; ``requests`` has the path and range of each request.

    ``faults`` is the part of the requests that fail, by turns: a 503, a body that is cut short, one that comes late.
    """

    daemon_threads = True
    request_queue_size = 512

    def __init__(self, objects=(), *, latency_s=0.0, faults=0.0, seed=0, kinds=KINDS, has_etags=True, port=0):
        super().__init__(("127.0.0.1", port), _Handler)
        self.objects = dict(objects)
        self.latency_s, self.faults, self.has_etags = latency_s, faults, has_etags
        self.kinds, self.requests, self.num_faults, self._random = kinds, [], 0, random.Random(seed)
        self.spoil = lambda *answer: answer  # changes the status, headers and body of answers with objects
        self.listed_bytes = None  # the size of each object in lists; None: the right one
        self.query = ""  # of URLs, such as a signature
        self.refuses_uploads = self.refuses_parts = False
        self.refused = "nothing"  # part of the paths of uploads that are refused
        self.parts, self.puts = {}, []  # parts of uploads that are not complete, and paths in the order of arrival
        self.num_running = self.most_at_a_time = 0
        self.url = f"http://127.0.0.1:{self.server_port}"

    def fault(self):
        """Return the fault of the next request: 503, short, slow or an empty string."""
        if self._random.random() >= self.faults:
            return ""
        self.num_faults += 1
        return self.kinds[self.num_faults % len(self.kinds)]

    def handle_error(self, request, address):
        """Clients may go away."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_PUT(self):
        """Store an object, or a part of one as in S3."""
        data = self.rfile.read(int(self.headers["Content-Length"]))
        path, _, query = self.path.partition("?")
        is_refused = self.server.refuses_uploads or self.server.refused in path
        if is_refused or (query and self.server.refuses_parts):
            return self._answer(403)
        self.server.puts.append(path)
        if query:
            number = int(re.search(r"partNumber=(\d+)", query)[1])
            self.server.parts.setdefault(path, {})[number] = data
        else:
            self.server.objects[path] = data
        return self._answer(200, headers={"ETag": '"1"'})

    def do_POST(self):
        """Begin or complete an upload in parts, or remove objects, as in S3."""
        data = self.rfile.read(int(self.headers["Content-Length"] or 0)).decode()
        path, _, query = self.path.partition("?")
        if query == "delete":
            keys = re.findall("<Key>(.*?)</Key>", data)
            for key in keys:
                self.server.objects.pop(f"{path}/{key}", None)
            deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            return self._answer(200, body=f"<DeleteResult>{deleted}</DeleteResult>".encode())
        if query.startswith("uploads"):
            self.server.parts[path] = {}
            result = "InitiateMultipartUploadResult"
            return self._answer(200, body=f"<{result}><UploadId>7</UploadId></{result}>".encode())
        parts = self.server.parts.pop(path)
        self.server.objects[path] = b"".join(parts[number] for number in sorted(parts))
        return self._answer(200, body=b"<CompleteMultipartUploadResult><ETag>1</ETag></CompleteMultipartUploadResult>")

    def do_DELETE(self):
        """Remove an object, or the parts of an upload."""
        path, _, query = self.path.partition("?")
        (self.server.parts if query else self.server.objects).pop(path, None)
        return self._answer(204)

    def do_GET(self):
        self.server.num_running += 1
        self.server.most_at_a_time = max(self.server.most_at_a_time, self.server.num_running)
        try:
            self._get()
        finally:
            self.server.num_running -= 1

    def _get(self):
        path, _, query = self.path.partition("?")
        server, data = self.server, self.server.objects.get(unquote(path))
        if server.query and query != server.query:
            return self._answer(403)
        server.requests.append((self.path, self.headers.get("Range")))
        if server.latency_s:
            time.sleep(server.latency_s)
        if data is None and "list-type=2" in self.path:
            return self._list()
        if data is None:
            return self._answer(404)
        etag = etag_of(data) if server.has_etags else None
        if self.headers.get("If-Match", etag) != etag:
            return self._answer(412)
        fault = server.fault()
        if fault == "503":
            return self._answer(503)
        headers = {"Last-Modified": formatdate(1_700_000_000, usegmt=True), **({"ETag": etag} if etag else {})}
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not match:
            return self._answer(*server.spoil(200, headers, memoryview(data)))
        start, stop = int(match[1]), min(int(match[2]) + 1, len(data))
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        return self._answer(*server.spoil(206, headers, memoryview(data)[start:stop]), fault)

    def _list(self):
        """List objects as S3 does."""
        bucket, _, query = self.path.partition("?")
        bucket = bucket.rstrip("/")
        prefix = f"{bucket}/{dict(parse_qsl(query)).get('prefix', '')}"
        entries = "".join(
            f"<Contents><Key>{path.removeprefix(bucket + '/')}</Key><LastModified>2026-01-01T00:00:00.000Z"
            f"</LastModified><ETag>{etag_of(data)}</ETag>"
            f"<Size>{self.server.listed_bytes or len(data)}</Size></Contents>"
            for path, data in sorted(self.server.objects.items())
            if path.startswith(prefix)
        )
        result = "ListBucketResult"
        return self._answer(200, body=f"<{result}><IsTruncated>false</IsTruncated>{entries}</{result}>".encode())

    def _answer(self, status, headers=(), body=b"", fault=""):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault == "short":
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            return
        if fault == "slow":
            self.wfile.write(body[:100])
            self.wfile.flush()
            time.sleep(0.05)
            body = body[100:]
        self.wfile.write(body)


def etag_of(data):
    return f'"{hashlib.md5(data[:4096]).hexdigest()}-{len(data)}"'


@contextmanager
def object_server(objects=(), **options):
    """Run a server in a thread."""
    server = ObjectServer(objects, **options)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        server.server_close()


@contextmanager
def bucket_server(monkeypatch):
    """Run a server that speaks as much of the protocol of S3 as is needed, for URLs such as ``s3://bucket/a.h5``."""
    with object_server() as server:
        for name, value in {"ENDPOINT_URL": server.url, "ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret"}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        disconnect()  # so that another process sees the environment
        yield server
    disconnect()


def disconnect():
    """Forget the process that makes requests, so that another one is started."""
    for connection in client._current.copy():
        connection.close()
    client._current.clear()
    client._paths.clear()
