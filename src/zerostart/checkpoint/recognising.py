"""What a file is that is not what its name says: told from its first bytes, and only after it was refused."""

from __future__ import annotations

#: The first bytes that are looked at: up to the mark of a tar archive.
HEAD_BYTES = 512
_LATER = "download it again"
_HTML = (b"<!doctype html", b"<html", b"<head", b"<?xml", b"<body", b"<!--")
#: How a file begins, what it then is, and what to do.
_BEGINNINGS = (
    (
        b"version https://git-lfs",
        "a git-lfs pointer and not the file itself",
        "fetch it with git lfs pull, or with hf download",
    ),
    (b"GGUF", "a GGUF file, of llama.cpp", "take the repository with the safetensors that it was made of"),
    (b"PK\3\4", "a zip archive, as torch.save writes it", "call it .bin or .pt if it is one of torch's"),
    (b"\x1f\x8b", "compressed (gzip)", "unpack it first"),
    (b"\x28\xb5\x2f\xfd", "compressed (zstd)", "unpack it first"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it first"),
    (b"Rar!", "a rar archive", "unpack it first"),
    (b"\x89HDF", "an HDF5 file, of Keras", "take the repository with the safetensors"),
    (b"\x80\2", "a bare pickle", "save its tensors as safetensors, if you trust where it comes from"),
    (b"\x80\4", "a bare pickle", "save its tensors as safetensors, if you trust where it comes from"),
)
#: Suffixes of files of weights that are not read, and what to do about each.
OTHER_FORMATS = {
    ".gguf": "GGUF files, of llama.cpp, are not read: take the repository with the safetensors",
    ".incomplete": "an incomplete download: run it again",
    ".part": "an incomplete download: run it again",
    ".crdownload": "an incomplete download: run it again",
    ".h5": "HDF5 files, of Keras, are not read: take the repository with the safetensors",
    ".msgpack": "files of Flax are not read: take the repository with the safetensors",
    ".onnx": "ONNX files are not read: take the repository with the safetensors",
    ".tar": "an archive: unpack it first",
    ".tgz": "an archive: unpack it first",
    ".gz": "compressed: unpack it first",
    ".zip": "an archive: unpack it first",
}


def named_kind(head: bytes) -> str:
    """What a file with these first bytes is, and what to do, as an end of a message; empty: not known."""
    for beginning, kind, remedy in _BEGINNINGS:
        if head.startswith(beginning):
            return f"it is {kind}; {remedy}"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text[:16].lower().startswith(_HTML):
        return f"it is a web page, such as a site gives for a file that asks for a login; {_LATER}"
    if head[257:262] == b"ustar":
        return "it is a tar archive; unpack it first"
    if len(head) >= 8 and not any(head):
        return f"it begins with nothing but zeros, like an incomplete download; {_LATER}"
    return ""
