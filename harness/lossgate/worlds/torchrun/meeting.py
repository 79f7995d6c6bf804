# SPDX-License-Identifier: Apache-2.0
"""How rank 0 and the other processes find one another, and the first message that each sends."""

import importlib.metadata
import os
import pickle
import platform
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from lossgate.base.launch import Launch

_KEY = "lossgate/driver"
_AT_A_TIME = 0.1
"""Seconds that rank 0 waits for the next connection before it checks whether all have arrived."""


@dataclass(frozen=True)
class Address:
    """Where rank 0 listens."""

    host: str
    port: int
    key: bytes


@dataclass(frozen=True)
class Hello:
    """The first message of a rank on each of its two connections."""

    rank: int
    purpose: str
    """``"work"`` or ``"alarm"``."""
    host: str
    gpu: int | None
    """The number of its CUDA device on its host. None if the host has too few."""
    versions: Mapping[str, str]
    """The versions of Python and of each installed package, by name."""


def open_store() -> dist.Store:
    """Returns the store that all processes of a torchrun share."""
    return next(dist.rendezvous("env://"))[0]


def publish(address: Address, store: dist.Store) -> None:
    """Tells the other processes where rank 0 listens."""
    given: Any = pickle.dumps(address)  # torch's stub allows only text
    store.set(_KEY, given)


def connect(store: dist.Store, launch: Launch, purpose: str) -> Connection:
    """Waits until rank 0 listens, connects to it, and says hello."""
    address: Address = pickle.loads(store.get(_KEY))
    connection: Any = Client((address.host, address.port), authkey=address.key)
    send_at_once(connection)
    connection.send(hello(launch, purpose))
    return connection


def hello(launch: Launch, purpose: str) -> Hello:
    """Returns the first message of this process."""
    installed = {package.name: package.version for package in importlib.metadata.distributions()}
    gpu = launch.local_rank if launch.local_rank < torch.cuda.device_count() else None
    return Hello(launch.rank, purpose, socket.gethostname(), gpu, {"python": platform.python_version(), **installed})


@dataclass(frozen=True)
class Arrived:
    """A process that has connected to rank 0."""

    hello: Hello
    connection: Connection


def gather(launch: Launch, store: dist.Store, seconds: float) -> list[Arrived]:
    """Waits until each of the other processes has connected twice, or until the time is over.

    A process that connects without the key is ignored.
    """
    key, arrived = secrets.token_bytes(32), SimpleQueue[Arrived]()
    deadline = time.monotonic() + seconds
    with socket.create_server(("", 0), backlog=2 * launch.ranks) as server:
        server.settimeout(_AT_A_TIME)
        publish(Address(launch.host, server.getsockname()[1], key), store)
        while arrived.qsize() < 2 * (launch.ranks - 1) and time.monotonic() < deadline:
            with suppress(TimeoutError):
                connected, _ = server.accept()
                connected.setblocking(True)
                connection = Connection(connected.detach())
                Thread(target=_greet, args=(connection, key, arrived), daemon=True).start()
    return [arrived.get() for _ in range(arrived.qsize())]


def _greet(connection: Connection, key: bytes, arrived: SimpleQueue[Arrived]) -> None:
    """Receives the hello of a process that has connected, if it knows the key."""
    with suppress(EOFError, OSError, AuthenticationError):
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        send_at_once(connection)
        arrived.put(Arrived(connection.recv(), connection))


def send_at_once(connection: Any) -> None:
    """Makes a connection send each part of a message at once. By default TCP delays the second part
    by 40 ms.
    """
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def open_descriptors() -> frozenset[int]:
    """Returns this process's open file descriptors. Their connections must outlive any task."""
    listed = [int(name) for name in os.listdir("/dev/fd")]
    return frozenset(number for number in listed if _is_open(number))  # listing the folder opened one, for itself


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
