"""What holds for every test: one thread, no network, fixed seeds, no deadline that a busy machine would miss."""

# ruff: noqa: E402
from __future__ import annotations

import os

# Before anything imports torch, Triton or a hub's client: they read these once.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TRITON_INTERPRET", "1")  # on a machine with a GPU, 0 tests the kernels on it
for _switch in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
    os.environ[_switch] = "1"

import ipaddress
import random
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ("browser", "tiny")

settings.register_profile(
    "qurve",
    deadline=None,
    derandomize="CI" in os.environ,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("qurve")

_attempts: list[str] = []


class NetworkUse(OSError):
    """A test reached for another machine."""


def _is_loopback(host: object) -> bool:
    if host in (None, "", b"", "localhost", b"localhost"):
        return True
    text = host.decode() if isinstance(host, bytes) else str(host)
    try:
        return ipaddress.ip_address(text.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _refuse(host: object) -> None:
    if not _is_loopback(host):
        _attempts.append(str(host))
        raise NetworkUse(f"tests are offline, and this one reached for {host!r}")


def _guarded_address(method: Callable[..., Any]) -> Callable[..., Any]:
    """Guard a socket method whose last positional argument is an address: a pair for internet sockets, else a path."""

    def guarded(self: socket.socket, *args: Any) -> Any:
        if isinstance(args[-1], tuple):
            _refuse(args[-1][0])
        return method(self, *args)

    return guarded


def _guarded_lookup(host: Any, *args: Any, **kwargs: Any) -> Any:
    _refuse(host)
    return _getaddrinfo(host, *args, **kwargs)


_getaddrinfo = socket.getaddrinfo


def pytest_configure() -> None:
    for name in ("connect", "connect_ex", "sendto"):
        setattr(socket.socket, name, _guarded_address(getattr(socket.socket, name)))
    socket.getaddrinfo = _guarded_lookup


@pytest.fixture(autouse=True)
def network_attempts() -> Iterator[list[str]]:
    """Hosts this test reached for. It fails if there are any, even where the code under test swallowed the refusal."""
    _attempts.clear()
    yield _attempts
    if _attempts:
        pytest.fail(f"tests are offline, and this one reached for {', '.join(_attempts)}")


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Every test starts from the same random numbers, whatever ran before it. Nothing is imported for it."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
