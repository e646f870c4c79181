"""Stands where librosa is not installed: Wan's script takes its reader of sounds, and is given no sounds."""


def load(path: str, sr: int) -> None:
    raise RuntimeError("librosa is not installed")
