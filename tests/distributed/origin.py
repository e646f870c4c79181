"""A web server of a folder's files in the namespace of ``nodes.py``, which counts; until its input ends.

python -m tests.distributed.origin FOLDER RATE
"""

import asyncio
import json
import sys
from pathlib import Path

from tests.stores import proxy, servers


async def serve(line: proxy.Proxy) -> None:
    server = await asyncio.start_server(line.serve, "10.231.9.100", 8080, limit=1 << 20)
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    server.close()


if __name__ == "__main__":
    with servers.rclone(Path(sys.argv[1]), "webdav") as address:
        line = proxy.Proxy(address, 0.002, float(sys.argv[2]))
        asyncio.run(serve(line))
    print(json.dumps(line.sent_of), flush=True)
