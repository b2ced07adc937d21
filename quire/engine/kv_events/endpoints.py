"""Endpoints of sockets: those of each replica, and whether a socket binds or connects."""

from __future__ import annotations

from typing import Any

import zmq


class EndpointUnavailable(Exception):
    """A socket could not be bound or connected."""


def endpoint_of(endpoint: str, rank: int) -> str:
    """Return the endpoint of a replica, from that of the first: TCP ports are counted up, paths get a suffix.

    The port 0, which the operating system replaces by a free one, is that of all replicas.
    """
    if rank == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    address, _, port = endpoint.rpartition(":")
    return endpoint if port == "0" else f"{address}:{int(port) + rank}"


def open_socket(socket: zmq.Socket[Any], endpoint: str, *, connects: bool = False) -> str:
    """Bind a socket, or connect it to another host; return its endpoint, with the port that it has.

    Args:
        socket: a socket.
        endpoint: it is bound to * and :: and paths, as vLLM does.
        connects: it connects to other addresses instead of being bound to them.

    Raises:
        EndpointUnavailable: it cannot be.
    """
    binds = not connects or "*" in endpoint or "::" in endpoint or not endpoint.startswith("tcp://")
    address = endpoint.replace("tcp://:::", "tcp://[::]:")
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)
    try:
        if not binds:
            socket.connect(address)
            return endpoint
        socket.bind(address)
    except zmq.ZMQError as error:
        raise EndpointUnavailable(f"--kv-events-config: {endpoint} is not available: {error.strerror}") from error
    if not endpoint.endswith(":0"):
        return endpoint
    port = socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    return f"{endpoint.rpartition(':')[0]}:{port}"
