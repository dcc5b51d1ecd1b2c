"""Carry a model to a machine without a network in pieces of bounded size, and rebuild its folder there.

    python benchmarks/carry.py pack MODEL.gguf FOLDER PIECES --name small --size-mb 57
    python benchmarks/carry.py unpack PIECES/small.* FOLDER

FOLDER is what the GGUF file was converted to (benchmarks/models.py). Its matrices travel as the quantised blocks that they were
made from, norms and biases as they are, equal tensors once, and with them the part of the package gguf that reads the blocks,
since `unpack` needs numpy and torch alone. The rebuilt files are the same byte for byte: `pack` refuses a tensor that its
blocks do not give, and `unpack` checks every tensor.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import lzma
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

MAGIC = b"kvcarry1"
READER = ("constants.py", "lazy.py", "quants.py")
"""Files of the package gguf that dequantising needs; importing the whole package would need more packages."""
CHUNK = 1 << 19
"""Values dequantised at once: enough that threads seldom wait for the interpreter, few enough for a core's cache."""
WORTH = 0.97
"""A blob is compressed if that leaves at most this part of it."""
DECODERS: dict[str, Callable[[Any], Any]] = {
    "": memoryview,
    "zlib": zlib.decompress,
    "lzma": lzma.decompress,
}


def digest(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()


def rounded(values: np.ndarray) -> np.ndarray:
    """The bits of float32 values in bfloat16."""
    return torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()


def chunks(quant: Any, blocks: np.ndarray, out: np.ndarray) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
    """What `dequantise` takes, for stretches of a tensor's blocks and of its bfloat16 bytes."""
    rows, results = blocks.reshape(-1, quant.type_size), out.reshape(-1, 2 * quant.block_size)
    step = max(1, CHUNK // quant.block_size)
    for start in range(0, len(rows), step):
        yield quant, rows[start : start + step], results[start : start + step]


def dequantise(job: tuple[Any, np.ndarray, np.ndarray]) -> None:
    # Its own `dequantize` takes 16 rows at a time, and threads would take turns.
    quant, blocks, out = job
    out[:] = rounded(quant.dequantize_blocks(blocks)).view(np.uint8).reshape(out.shape)


def tensors_of(path: Path) -> tuple[bytes, np.ndarray, dict[str, tuple[int, int]]]:
    """A safetensors file's head, as it is, the bytes after it, and where in these each tensor is."""
    data = np.memmap(path, np.uint8, "r")
    size = 8 + int.from_bytes(data[:8].tobytes(), "little")
    head = data[:size].tobytes()
    entries = {name: entry for name, entry in json.loads(head[8:]).items() if name != "__metadata__"}
    return head, data[size:], {name: tuple(entry["data_offsets"]) for name, entry in entries.items()}


def orders(name: str, data: np.ndarray, config: dict[str, Any]) -> Iterator[np.ndarray]:
    """A GGUF tensor with its rows as they are, then as transformers has them where llama.cpp pairs a head's rows."""
    yield data
    heads = {"attn_q.": "num_attention_heads", "attn_k.": "num_key_value_heads"}
    for part, key in heads.items():
        if part in name:
            paired = data.reshape(config[key], -1, 2, *data.shape[1:])
            yield paired.swapaxes(1, 2).reshape(data.shape)


def sources(gguf_file: Path, config: dict[str, Any], wanted: set[str]) -> Iterator[tuple[str, str, bytes]]:
    """For tensors (digests of their bfloat16 bytes) their block type and blocks, or "" and the bytes themselves."""
    import gguf

    for tensor in gguf.GGUFReader(gguf_file).tensors:
        kind = tensor.tensor_type.name
        quant = getattr(gguf.quants, kind, None)
        for data in orders(tensor.name, tensor.data, config):
            if quant is None:
                kind, content = "", rounded(np.array(data, np.float32)).tobytes()
                found = digest(content)
            else:
                quant.init_grid()
                blocks = np.ascontiguousarray(data)
                out = np.empty(blocks.size // quant.type_size * quant.block_size * 2, np.uint8)
                for job in chunks(quant, blocks, out):
                    dequantise(job)
                content, found = blocks.tobytes(), digest(out)
            if found in wanted:
                yield found, kind, content
                break


def squeezed(data: bytes, codec: str) -> tuple[str, bytes]:
    """Data and how it is compressed, if a sample from its middle says that it is worth it."""
    pack = lzma.compress if codec == "lzma" else lambda content: zlib.compress(content, 1)
    sample = data[len(data) // 2 :][: 1 << 20]
    if len(pack(sample)) > WORTH * len(sample):
        return "", data
    small = pack(data)
    return (codec, small) if len(small) <= WORTH * len(data) else ("", data)


def pack(gguf_file: Path, folder: Path, out: Path, name: str, limit: int) -> None:
    import gguf

    blobs: list[dict[str, Any]] = []
    body: list[bytes] = []

    def put(data: bytes, codec: str) -> int:
        codec, data = squeezed(data, codec)
        blobs.append({"size": len(data), "codec": codec})
        body.append(data)
        return len(blobs) - 1

    paths = sorted(path for path in folder.iterdir() if path.is_file())
    package = Path(gguf.__file__).parent
    index: dict[str, Any] = {
        "reader": {file: put((package / file).read_bytes(), "lzma") for file in READER},
        "files": {
            path.name: put(path.read_bytes(), "lzma") for path in paths if path.suffix != ".safetensors"
        },
        "weights": {},
        "blobs": blobs,
    }
    shards = {path.name: tensors_of(path) for path in paths if path.suffix == ".safetensors"}
    digests = {
        (file, tensor): digest(data[start:end])
        for file, (_, data, places) in shards.items()
        for tensor, (start, end) in places.items()
    }
    config = json.loads((folder / "config.json").read_text())
    sent: dict[str, tuple[str, int]] = {}
    wanted = set(digests.values())
    for found, kind, content in sources(gguf_file, config, wanted):
        if found not in sent:
            sent[found] = kind, put(content, "zlib")
    missing = [tensor for (_, tensor), found in digests.items() if found not in sent]
    if missing:
        raise SystemExit(f"{gguf_file} does not give {folder} its {', '.join(missing)}")
    for file, (head, data, places) in shards.items():
        tensors = [
            [start, end, *sent[digests[file, tensor]], digests[file, tensor]]
            for tensor, (start, end) in places.items()
        ]
        index["weights"][file] = {"head": put(head, "lzma"), "bytes": len(data), "tensors": tensors}

    head = zlib.compress(json.dumps(index).encode())
    stream = b"".join([MAGIC, len(head).to_bytes(8, "little"), head, *body])
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob(f"{name}.*"):
        old.unlink()
    for number, start in enumerate(range(0, len(stream), limit)):
        piece = out / f"{name}.{number:02d}"
        piece.write_bytes(stream[start : start + limit])
        print(piece, piece.stat().st_size)
    kinds = sorted({kind or "as it is" for kind, _ in sent.values()})
    print(f"{len(digests)} tensors, {len(sent)} sent ({', '.join(kinds)}): {len(stream):,} bytes")


def blocks_reader(files: dict[str, Any]) -> Any:
    """The dequantisers of gguf, from files that came along."""
    with tempfile.TemporaryDirectory() as place:
        package = Path(place) / "carried_gguf"
        package.mkdir()
        for file, content in {"__init__.py": b"", **files}.items():
            (package / file).write_bytes(content)
        sys.path.insert(0, place)
        try:
            return importlib.import_module("carried_gguf.quants")
        finally:
            sys.path.remove(place)


def unpack(pieces: list[Path], folder: Path) -> None:
    began = time.perf_counter()
    pieces = sorted(pieces, key=lambda piece: int(piece.suffix[1:]))
    stream = memoryview(b"".join(piece.read_bytes() for piece in pieces))
    if stream[:8] != MAGIC:
        raise SystemExit(f"{pieces[0]} is not the first piece")
    at = 16 + int.from_bytes(stream[8:16], "little")
    index = json.loads(zlib.decompress(stream[16:at]))
    stored = []
    for blob in index["blobs"]:
        stored.append((blob["codec"], stream[at : at + blob["size"]]))
        at += blob["size"]
    if at != len(stream):
        raise SystemExit(
            f"{len(stream):,} bytes in {len(pieces)} pieces, not {at:,}: a piece is missing or old"
        )

    torch.set_num_threads(1)  # each worker has its own share of the cores
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        blobs = list(pool.map(lambda blob: DECODERS[blob[0]](blob[1]), stored))
        quants = blocks_reader({file: blobs[blob] for file, blob in index["reader"].items()})
        folder.mkdir(parents=True, exist_ok=True)
        for file, blob in index["files"].items():
            (folder / file).write_bytes(blobs[blob])
        jobs: list[tuple[Any, np.ndarray, np.ndarray]] = []
        checks: list[tuple[str, np.ndarray]] = []
        for file, shard in index["weights"].items():
            head = blobs[shard["head"]]
            (folder / file).write_bytes(head)
            size = len(head) + shard["bytes"]
            data = np.memmap(folder / file, np.uint8, "r+", shape=(size,))[len(head) :]
            for start, end, kind, blob, found in shard["tensors"]:
                source, target = np.frombuffer(blobs[blob], np.uint8), data[start:end]
                checks.append((found, target))
                if kind:
                    quant = getattr(quants, kind)
                    quant.init_grid()
                    jobs.extend(chunks(quant, source, target))
                else:
                    target[:] = source
        list(pool.map(dequantise, jobs))
        wrong = sum(not same for same in pool.map(lambda check: digest(check[1]) == check[0], checks))
    if wrong:
        raise SystemExit(f"{wrong} of {len(checks)} tensors are not what was packed")
    print(f"{folder}: {len(checks)} tensors as packed, {time.perf_counter() - began:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("gguf", type=Path)
    packing.add_argument("folder", type=Path)
    packing.add_argument("out", type=Path)
    packing.add_argument("--name", help="of the pieces; default: the folder's")
    packing.add_argument(
        "--size-mb", type=float, default=57, help="megabytes of a piece at most (default: 57)"
    )
    unpacking = commands.add_parser("unpack")
    unpacking.add_argument("pieces", type=Path, nargs="+")
    unpacking.add_argument("folder", type=Path)
    chosen = parser.parse_args()
    if chosen.command == "pack":
        name = chosen.name or chosen.folder.resolve().name
        pack(chosen.gguf, chosen.folder, chosen.out, name, int(chosen.size_mb * 1e6))
    else:
        unpack(chosen.pieces, chosen.folder)


if __name__ == "__main__":
    main()
