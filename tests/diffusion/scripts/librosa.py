"""Stand-in for librosa, which Wan's script imports; these tests have no audio."""


def load(path: str, sr: int) -> None:
    raise RuntimeError("librosa is not installed")
