"""How the hosts of a job reach each other, and what to do where they do not."""

from __future__ import annotations

import fcntl
import logging
import os
import resource
import socket
import struct
from pathlib import Path

from zerostart.distributed.machine import machine_name

logger = logging.getLogger("zerostart")

_INTERFACE = "GLOO_SOCKET_IFNAME"
_PAGE = "see docs/clusters.md"
#: Asks for the IPv4 address of an interface (linux/sockios.h).
_SIOCGIFADDR = 0x8915
#: Files that a process may need beside its connections: a checkpoint's, logs, devices.
_OTHER_FILES = 64


def explained(error: BaseException) -> str:
    """What to do about gloo's ``error``, with a space before it; empty for one of another kind."""
    text = str(error)
    if "Too many open files" in text:
        return f" The process may open {_file_limit()} files (RLIMIT_NOFILE): raise it (ulimit -n; {_PAGE})."
    if "Unable to find address for" in text or "Unable to find interface" in text:
        return f" {_no_interface()}."
    if any(
        word in text.lower()
        for word in ("connect timeout", "connection refused", "no route", "connecttimeout")
    ):
        return f" Ranks cannot connect to each other: {_remedy()}."
    return ""


def unreachable() -> str:
    """Why ranks on other hosts cannot connect to this one, in words; empty if nothing speaks against it."""
    host = socket.gethostname()
    if named := os.environ.get(_INTERFACE):
        there = {"", *(name for _, name in socket.if_nameindex())}
        return "" if there.issuperset(named.split(",")) else f"{host}: {_no_interface()}"
    addresses = _addresses(host)
    if any(
        not (address.startswith("127.") or address == "::1") and _is_own(address) for address in addresses
    ):
        return ""
    resolved = f"resolves to {', '.join(addresses)}" if addresses else "does not resolve"
    return (
        f"the ranks are on several hosts, and the name of {host} {resolved}, where no other host reaches it "
        f"(gloo, over which the ranks' messages go, takes that address): {_remedy()}"
    )


def own_address() -> str:
    """The IPv4 address by which the job's other hosts reach this one; 127.0.0.1 where nothing says so."""
    _, address = _way_to_first_rank()
    named = (found for found in _addresses(socket.gethostname()) if ":" not in found and _is_own(found))
    return address or next((found for found in named if not found.startswith("127.")), "127.0.0.1")


def network_rate(root: Path = Path("/")) -> float | None:
    """Bytes a second of the interface by which this host reaches the others, by its driver; None: unknown."""
    name = os.environ.get(_INTERFACE, "").split(",")[0] or _way_to_first_rank()[0]
    try:
        megabits = int((root / "sys/class/net" / name / "speed").read_text()) if name else -1
    except (OSError, ValueError):  # a virtual one has none
        return None
    return megabits * 1e6 / 8 if megabits > 0 else None


def network_view(root: Path = Path("/")) -> str:
    """What processes have in common that reach each other at 127.0.0.1: the machine and its network."""
    try:
        return f"{machine_name(root)} {(root / 'proc/self/ns/net').readlink()}"
    except OSError:
        return machine_name(root)


def tell_file_limit(ranks: int) -> None:
    """Warn where this process may not open as many files as connections with all ``ranks`` would take."""
    limit, used = _file_limit(), _open_files()
    if limit - used < ranks + _OTHER_FILES:
        logger.warning(
            "this process may open %d files (RLIMIT_NOFILE) and has %d open; when %d ranks all "
            "exchange bytes with each other, each needs %d more: raise the limit (ulimit -n; %s)",
            *(limit, used, ranks, ranks + _OTHER_FILES, _PAGE),
        )


def _no_interface() -> str:
    named, there = os.environ.get(_INTERFACE, ""), ", ".join(name for _, name in socket.if_nameindex())
    return f"{_INTERFACE}={named} names no interface with an address; this host has {there} ({_PAGE})"


def _remedy() -> str:
    name, address = _way_to_first_rank()
    named = f"{_INTERFACE}={name} ({address} on this host, the way to MASTER_ADDR)" if name else _INTERFACE
    return (
        f"set {named} on every host to the interface that leads to the others, or have the host's name "
        f"resolve to its address there (Debian's /etc/hosts says 127.0.1.1); {_PAGE}"
    )


def _way_to_first_rank() -> tuple[str, str]:
    """Interface and address by which this host reaches MASTER_ADDR; empty where there is none."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
            probe.connect((os.environ["MASTER_ADDR"], int(os.environ.get("MASTER_PORT", "1"))))
            own = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                try:
                    asked = struct.pack("256s", name.encode()[:15])
                    if socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, asked)[20:24]) == own:
                        return name, own
                except OSError:
                    continue  # has no address
    except (KeyError, OSError, ValueError):
        pass
    return "", ""


def _addresses(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _is_own(address: str) -> bool:
    """Whether this host has an address; gloo listens at the first of its name's that it has."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _file_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _open_files() -> int:
    try:
        return len(list(Path("/proc/self/fd").iterdir()))
    except OSError:
        return 0
