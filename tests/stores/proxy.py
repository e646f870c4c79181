"""A recording proxy that refuses or breaks requests."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

#: None; a status; ``dead``: no answer; ``cut``: half of the request's body is forwarded; ``lost``: forwarded,
#: not answered; otherwise half of the answer's body is sent.
Fault = int | str | None
PIECE = 1 << 18


@dataclass
class Proxy:
    """``fault(method, path, number)`` decides about a numbered request."""

    target: str
    fault: Callable[[str, str, int], Fault] = lambda method, path, number: None
    flipped: str = ""  #: change a byte of each PUT whose path contains this
    address: str = ""
    requests: list[tuple[str, str]] = field(default_factory=list)  #: method and path of each request

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self.target.removeprefix("http://").split(":")
        up_reader, up_writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
        try:
            while await self._forward(reader, writer, up_reader, up_writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            up_writer.close()

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        up_reader: asyncio.StreamReader,
        up_writer: asyncio.StreamWriter,
    ) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
        number = len(self.requests)
        self.requests.append((method, path))
        fault = self.fault(method, path, number)
        if fault == "dead":
            writer.transport.abort()
            return False
        if isinstance(fault, int):
            # The client may still be sending a body, which is not read.
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
        remaining = int(fields.split(b"content-length:")[1].split(b"\r\n")[0])
        stop = remaining // 2 if fault is not None else -1
        while remaining > max(0, stop):
            piece = await up_reader.read(min(PIECE, remaining))
            if not piece:
                return False
            remaining -= len(piece)
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
        """Forward a request; return True if all of it was forwarded."""
        fields = head.lower()
        remaining = (
            int(fields.split(b"content-length:")[1].split(b"\r\n")[0]) if b"content-length:" in fields else 0
        )
        if b"expect: 100-continue" in fields:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            head = b"\r\n".join(
                line for line in head.split(b"\r\n") if not line.lower().startswith(b"expect:")
            )
        up_writer.write(head)
        stop = remaining // 2 if fault == "cut" else -1
        while remaining > max(0, stop):
            piece = await reader.read(min(PIECE, remaining))
            if not piece:
                return False
            remaining -= len(piece)
            up_writer.write(bytes([piece[0] ^ 1]) + piece[1:] if flip else piece)
            flip = False
            await up_writer.drain()
        if fault == "cut":
            writer.transport.abort()
            up_writer.transport.abort()
        return fault != "cut"


@contextlib.contextmanager
def serve_proxy(proxy: Proxy) -> Iterator[Proxy]:
    """Listen at ``proxy.address`` in a thread during the context."""
    started = threading.Event()
    stop_functions: list[Callable[[], object]] = []

    async def main() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=1 << 20)
        proxy.address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        stop_functions.append(lambda: loop.call_soon_threadsafe(stop.set))
        started.set()
        await stop.wait()
        server.close()

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    started.wait()
    try:
        yield proxy
    finally:
        stop_functions[0]()
        thread.join()
