# SPDX-License-Identifier: Apache-2.0
"""How rank 0 and the other processes find one another, and what they say first."""

import importlib.metadata
import os
import pickle
import platform
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from typing import Any

import torch.distributed as dist

_KEY = "lossgate/driver"


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
    versions: Mapping[str, str]
    """Those of Python and of each installed package."""


def open_store() -> dist.Store:
    """Returns the store that all processes of a torchrun share."""
    return next(dist.rendezvous("env://"))[0]


def publish(address: Address, store: dist.Store) -> None:
    """Tells the other processes where rank 0 listens."""
    given: Any = pickle.dumps(address)  # torch's stub takes text alone
    store.set(_KEY, given)


def connect(store: dist.Store, rank: int, purpose: str) -> Connection:
    """Waits until rank 0 listens, connects to it, and says hello."""
    address: Address = pickle.loads(store.get(_KEY))
    connection: Any = Client((address.host, address.port), authkey=address.key)
    send_at_once(connection)
    connection.send(hello(rank, purpose))
    return connection


def hello(rank: int, purpose: str) -> Hello:
    """Returns the first message of this process."""
    installed = {package.name: package.version for package in importlib.metadata.distributions()}
    return Hello(rank, purpose, socket.gethostname(), {"python": platform.python_version(), **installed})


def send_at_once(connection: Any) -> None:
    """Has a connection not wait for more to send: a message of two parts would take 40 ms."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def open_descriptors() -> frozenset[int]:
    """Returns the file descriptors of this process, whose connections must outlive any task."""
    return frozenset(int(name) for name in os.listdir("/dev/fd"))
