"""A proxy before a store: it takes its time, limits the rate, refuses, and breaks off; and counts."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

#: What becomes of a request: None; a status; ``dead``, it is not answered; ``cut``, its own body breaks off
#: in the middle; ``lost``, it is done, and not answered; else the answer breaks off in the middle.
Fault = int | str | None
PIECE = 1 << 18


@dataclass
class Proxy:
    """``fault(method, path, number)`` says what becomes of a request; ``number`` counts them."""

    target: str
    latency: float = 0.0
    rate: float = 0.0  #: bytes a second of all bodies together; 0 for as fast as they come
    fault: Callable[[str, str, int], Fault] = lambda method, path, number: None
    flipped: str = ""  #: one byte of each body of a PUT with this in its path is changed
    address: str = ""
    asked: list[tuple[str, str]] = field(default_factory=list)  #: method and path of each request
    received: int = 0  #: bytes of bodies of requests
    sent_of: dict[str, int] = field(default_factory=dict)  #: bytes of bodies of ranges, by path
    _free: float = 0.0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self.target.removeprefix("http://").split(":")
        up_reader, up_writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
        try:
            while await self._one(reader, writer, up_reader, up_writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            up_writer.close()

    async def _one(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        up_reader: asyncio.StreamReader,
        up_writer: asyncio.StreamWriter,
    ) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
        number = len(self.asked)
        self.asked.append((method, path))
        await asyncio.sleep(self.latency)
        fault = self.fault(method, path, number)
        if fault == "dead":
            writer.transport.abort()
            return False
        if isinstance(fault, int):
            # The body, if any, is not read: the client may still be sending it.
            writer.write(f"HTTP/1.1 {fault} Refused\r\nContent-Length: 0\r\n\r\n".encode())
            await writer.drain()
            return b"content-length: 0" in head.lower() or method in ("GET", "HEAD", "DELETE")
        flip = method == "PUT" and bool(self.flipped) and self.flipped in path
        if not await self._send_up(head, fault, reader, writer, up_writer, flip):
            return False
        answer = await up_reader.readuntil(b"\r\n\r\n")
        if fault == "lost":
            writer.transport.abort()
            return False
        writer.write(answer)
        fields = answer.lower()
        if method == "HEAD" or b" 304 " in fields[:20] or b" 204 " in fields[:20]:
            return True
        if b"transfer-encoding: chunked" in fields:
            while (line := await up_reader.readuntil(b"\r\n")) != b"0\r\n":
                writer.write(line + await up_reader.readexactly(int(line, 16) + 2))
            writer.write(line + await up_reader.readexactly(2))
            return True
        left = int(fields.split(b"content-length:")[1].split(b"\r\n")[0])
        stop = left // 2 if fault is not None else -1
        ranged = b"range: bytes=" in head.lower()
        while left > max(0, stop):
            piece = await up_reader.read(min(PIECE, left))
            if not piece:
                return False
            left -= len(piece)
            self.sent_of[path] = self.sent_of.get(path, 0) + (len(piece) if ranged else 0)
            await self._pace(len(piece))
            writer.write(piece)
            await writer.drain()
        if fault == "reset":
            writer.transport.abort()
        return fault is None

    async def _send_up(
        self,
        head: bytes,
        fault: Fault,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        up_writer: asyncio.StreamWriter,
        flip: bool,
    ) -> bool:
        """Pass a request on; whether all of it was."""
        fields = head.lower()
        left = (
            int(fields.split(b"content-length:")[1].split(b"\r\n")[0]) if b"content-length:" in fields else 0
        )
        if b"expect: 100-continue" in fields:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            head = b"\r\n".join(
                line for line in head.split(b"\r\n") if not line.lower().startswith(b"expect:")
            )
        up_writer.write(head)
        stop = left // 2 if fault == "cut" else -1
        while left > max(0, stop):
            piece = await reader.read(min(PIECE, left))
            if not piece:
                return False
            left -= len(piece)
            self.received += len(piece)
            await self._pace(len(piece))
            up_writer.write(bytes([piece[0] ^ 1]) + piece[1:] if flip else piece)
            flip = False
            await up_writer.drain()
        if fault == "cut":
            writer.transport.abort()
            up_writer.transport.abort()
        return fault != "cut"

    async def _pace(self, count: int) -> None:
        if not self.rate:
            return
        now = time.perf_counter()
        self._free = max(now, self._free) + count / self.rate
        if self._free > now + 0.002:
            await asyncio.sleep(self._free - now)


@contextlib.contextmanager
def before(proxy: Proxy) -> Iterator[Proxy]:
    """While the block lasts it listens at ``proxy.address``, in a thread of its own."""
    started = threading.Event()
    ends: list[Callable[[], object]] = []

    async def main() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=1 << 20)
        proxy.address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ends.append(lambda: loop.call_soon_threadsafe(stop.set))
        started.set()
        await stop.wait()
        server.close()

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    started.wait()
    try:
        yield proxy
    finally:
        ends[0]()
        thread.join()
