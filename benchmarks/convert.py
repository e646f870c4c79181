"""Conversions: memory on a large sparse checkpoint, and seconds beside a raw copy of as many bytes.

    python benchmarks/convert.py OUT.json --folder DIR

The large checkpoint is sparse (``zerostart synth --sparse``), and so is what becomes of it. The small one
is random; each conversion of it alternates with ``cp`` of the same files, and both end with ``fsync`` of
what was written. The peak is that of anonymous memory (``RssAnon``), above what the process has after its
imports.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

WORKER = """
import json, sys, threading, time
import torch
from zerostart.state.converting.convert import convert
import zerostart.state.converting.formats, zerostart.models, transformers
if sys.argv[3] == "zero": import deepspeed
def anonymous():
    lines = open("/proc/self/status")
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
before = peak = anonymous()
going = True
def watch():
    global peak
    while going:
        peak = max(peak, anonymous())
        time.sleep(0.01)
thread = threading.Thread(target=watch)
thread.start()
begun = time.perf_counter()
made = convert(sys.argv[1], sys.argv[2], sys.argv[3], **json.loads(sys.argv[4]))
seconds = time.perf_counter() - begun
going = False
thread.join()
print(json.dumps({"seconds": seconds, "added_bytes": peak - before, "bytes": made.bytes, "to": sys.argv[3]}))
"""


def converted(source: Path, out: Path, to: str, **options: object) -> dict[str, object]:
    command = [sys.executable, "-c", WORKER, str(source), str(out), to, json.dumps(options)]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(found.stdout.splitlines()[-1])


def copied(source: Path, out: Path) -> float:
    begun = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(out)], check=True)
    for path in out.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    return time.perf_counter() - begun


def synth(folder: Path, layers: int, hidden: int, *more: str) -> Path:
    folder.mkdir(parents=True)
    config = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": hidden,
        "intermediate_size": 4 * hidden, "num_hidden_layers": layers, "num_attention_heads": hidden // 128,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "dtype": "bfloat16",
        "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    out = folder / "model"
    command = [sys.executable, "-m", "zerostart", "synth", str(folder / "config.json"), str(out), *more]
    subprocess.run(command, check=True, capture_output=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=70)
    parser.add_argument("--hidden", type=int, default=6656)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    result: dict[str, object] = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        "note": "other programs shared the machine",
    }
    small = synth(options.folder / "small", 8, 2048)
    rows = []
    for to in ("hf", "dcp", "zero"):
        for _ in range(options.repeats):
            out = options.folder / "out"
            copy = copied(small, out)
            shutil.rmtree(out)
            row = converted(small, out, to)
            shutil.rmtree(out)
            rows.append({**row, "copy_seconds": copy})
            print(rows[-1], flush=True)
    result["beside_cp"] = rows
    large = synth(options.folder / "large", options.layers, options.hidden, "--sparse")
    rows = []
    for to in ("hf", "dcp"):
        out = options.folder / "out"
        rows.append(converted(large, out, to))
        shutil.rmtree(out)
        print(rows[-1], flush=True)
    result["large"] = rows
    options.result.write_text(json.dumps(result, indent=1) + "\n")
    shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
