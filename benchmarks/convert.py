"""Conversions: memory on a large sparse checkpoint, and seconds beside a raw copy of as many bytes.

    python benchmarks/convert.py benchmarks/results/convert --folder DIR

The large checkpoint is sparse (``zerostart synth --sparse``), and so is what becomes of it: all its bytes are
read, summed up and looked at, and none goes to the disk (whose free space is not looked at for it). The small
one is random; each conversion of it alternates with ``cp`` of the same files, and both end with ``fsync`` of
what was written. The peak is that of anonymous memory (``RssAnon``), above what the process has after a
conversion of a tiny model.
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
from typing import Any

LIBRARIES = ("torch", "transformers", "deepspeed")
WORKER = """
import json, sys, threading, time
import zerostart
def anonymous():
    lines = open("/proc/self/status")
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
tiny, source, out, to, sparse = sys.argv[1:6]
if sparse:
    from zerostart.checkpoint.write import space
    space.free_space = lambda path: None  # holes need none, which nobody can know before
zerostart.convert(tiny, out + "-tiny", to)  # what is imported for it
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
made = zerostart.convert(source, out, to)
seconds = time.perf_counter() - begun
going = False
thread.join()
print(json.dumps({"to": to, "bytes": made.bytes, "seconds": seconds, "added_bytes": peak - before}))
"""


def converted(tiny: Path, source: Path, out: Path, to: str, sparse: str = "") -> dict[str, Any]:
    command = [sys.executable, "-c", WORKER, str(tiny), str(source), str(out), to, sparse]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    shutil.rmtree(out)
    shutil.rmtree(f"{out}-tiny")
    row: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return row


def copied(source: Path, out: Path) -> float:
    begun = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(out)], check=True)
    for path in out.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    return time.perf_counter() - begun


def synth(folder: Path, layers: int, hidden: int, vocabulary: int, *more: str) -> Path:
    folder.mkdir(parents=True)
    config = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": hidden,
        "intermediate_size": 4 * hidden, "num_hidden_layers": layers, "vocab_size": vocabulary,
        "num_attention_heads": max(8, hidden // 128), "num_key_value_heads": 8, "head_dim": 128,
        "dtype": "bfloat16", "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    out = folder / "model"
    command = [sys.executable, "-m", "zerostart", "synth", str(folder / "config.json"), str(out), *more]
    subprocess.run(command, check=True, capture_output=True)
    return out


def page(result: dict[str, Any]) -> str:
    lines = [
        "# Conversions",
        "",
        f"`python benchmarks/convert.py`, {result['machine']}, {result['versions']}; {result['note']}.",
        "Bytes are those of tensors that are written; memory is what a conversion adds at its highest.",
        "",
        "| to | bytes written | seconds | MiB added | `cp` of the source, s | GB/s, beside `cp`'s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in result["beside_cp"]:
        rates = row["bytes"] / row["seconds"] / 1e9, result["source_bytes"] / row["copy_seconds"] / 1e9
        lines.append(
            f"| {row['to']} | {row['bytes'] / 1e9:.2f} GB | {row['seconds']:.1f} | "
            f"{row['added_bytes'] >> 20} | {row['copy_seconds']:.1f} | {rates[0]:.2f}, {rates[1]:.2f} |"
        )
    for row in result["large"]:
        lines.append(
            f"| {row['to']}, sparse | {row['bytes'] / 1e9:.1f} GB (holes) | {row['seconds']:.1f} | "
            f"{row['added_bytes'] >> 20} | | |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=70)
    parser.add_argument("--hidden", type=int, default=6656)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    tiny = synth(options.folder / "tiny", 1, 64, 128)
    small = synth(options.folder / "small", 8, 2048, 151936)
    large = synth(options.folder / "large", options.layers, options.hidden, 151936, "--sparse")
    out = options.folder / "out"
    result: dict[str, Any] = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {
            name: importlib.metadata.version(name) for name in ("torch", "transformers", "deepspeed")
        },
        "note": "other programs shared the machine",
        "source_bytes": sum(path.stat().st_size for path in small.iterdir()),
        "large": [],
        "beside_cp": [],
    }
    for to in ("hf", "dcp"):
        result["large"].append(converted(tiny, large, out, to, "sparse"))
        print(result["large"][-1], flush=True)
    for _ in range(options.repeats):
        for to in ("hf", "dcp", "zero", "universal"):
            copy = copied(small, out)
            shutil.rmtree(out)
            result["beside_cp"].append({**converted(tiny, small, out, to), "copy_seconds": copy})
            print(result["beside_cp"][-1], flush=True)
    options.result.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    options.result.with_suffix(".md").write_text(page(result))
    shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
