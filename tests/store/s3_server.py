"""A real S3-compatible server on a free loopback port, for as long as the tests run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
BUCKET = "prefixes"


@contextmanager
def s3_server() -> Iterator[str]:
    """Its address; `BUCKET` exists. Moto's server speaks S3 over HTTP, signatures and listings included."""
    port = _free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **CREDENTIALS}
    )
    try:
        address = f"http://127.0.0.1:{port}"
        _wait(address, server)
        _make_bucket(address)
        yield address
    finally:
        server.kill()
        server.wait()


def _make_bucket(address: str) -> None:
    import boto3  # moto brings it

    boto3.client(
        "s3",
        endpoint_url=address,
        region_name=CREDENTIALS["AWS_REGION"],
        aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    ).create_bucket(Bucket=BUCKET)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait(address: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"moto's server ended with status {server.returncode}")
        try:
            urllib.request.urlopen(f"{address}/moto-api/", timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("moto's server did not start within 60 s")
