"""The diffusers part of the table, and excluded classes with their reasons."""

from collections.abc import Mapping

from tests.conformance.diffusion import FAMILIES
from tests.conformance.diffusion_suite import DiffusionResult, check_family

_NONE = "no original layout of it is written here yet; its converter {does}"
_RENAMES = _NONE.format(does="only renames")
_MOVES = _NONE.format(does="only renames, chunks and concatenates, all of which is traced")

#: Reasons for excluded classes that diffusers has a converter for.
EXCLUDED_CLASSES: Mapping[str, str] = {
    "AuraFlowTransformer2DModel": _MOVES,
    "AutoencoderDC": _NONE.format(does="renames, chunks and squeezes"),
    "AutoencoderKLLTXVideo": _RENAMES,
    "ChromaTransformer2DModel": _MOVES,
    "ChronoEditTransformer3DModel": "its converter is that of `wan`",
    "ControlNetModel": _RENAMES,
    "CosmosTransformer3DModel": _RENAMES,
    "ErnieImageTransformer2DModel": "its converter takes off a prefix",
    "Flux3Transformer2DModel": _MOVES,
    "HiDreamImageTransformer2DModel": "its converter takes off a prefix",
    "HunyuanVideoTransformer3DModel": _MOVES,
    "Krea2Transformer2DModel": _NONE.format(does="only renames and reshapes, all of which is traced"),
    "LTXVideoTransformer3DModel": _RENAMES,
    "Lumina2Transformer2DModel": _MOVES,
    "MiniMaxH3Transformer3DModel": _MOVES,
    "MochiTransformer3DModel": _MOVES,
    "MotifVideoTransformer3DModel": "its converter is the identity, as that of `qwen_image`",
    "MotionAdapter": _RENAMES,
    "QwenImage21Transformer2DModel": _MOVES,
    "SanaTransformer2DModel": _MOVES,
    "SD3Transformer2DModel": _MOVES,
    "SkyReelsV2Transformer3DModel": "its converter is that of `wan`",
    "SparseControlNetModel": _RENAMES,
    "StableCascadeUNet": _MOVES,
    "WanAnimate2Transformer3DModel": _RENAMES,
    "WanAnimateTransformer3DModel": "its converter is that of `wan`; its motion encoder is not written here",
    "ZImageControlNetModel": "its converter leaves tensors out, and changes none",
}

_HEAD = """## Diffusers: original layouts

Small models of diffusers {version}, written in the layout of the original release, in float32 and in a
half precision, and loaded as above (2 and 3 ranks, flat ZeRO partitions and `Shard(0)`, the same bound on
the bytes that are read), once more in diffusers' own layout. In float32 they are compared with
`from_single_file` of the same file; in the half precision with `from_pretrained(torch_dtype=...)` of what
the converter, run eagerly, makes of it. With a prefix there is a tensor of another component in the file,
which is not read.

{covered} families are covered, {wrong} of them wrong. Of the classes that diffusers has a converter for,
{left} are left out.

### Families

| family | class | converter | prefix | it does | dtypes | parameters | tensors | result | remark |
|---|---|---|---|---|---|---|---|---|---|
"""


def section() -> str:
    """Return the part of the page; runs missing families."""
    import diffusers

    results = [check_family(one.key) for one in FAMILIES]
    remaining = sorted(EXCLUDED_CLASSES)
    head = _HEAD.format(
        version=diffusers.__version__,
        covered=len(results),
        wrong=sum(bool(result.differences) for result in results),
        left=len(remaining),
    )
    rows = [
        *map(_row, results),
        "\n### Classes left out\n",
        "| class | reason |",
        "|---|---|",
        *(f"| {name} | {EXCLUDED_CLASSES[name]} |" for name in remaining),
    ]
    return head + "\n".join(rows) + "\n"


def converter_classes() -> set[str]:
    """Return the classes that diffusers has a converter for."""
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    return set(SINGLE_FILE_LOADABLE_CLASSES)


def _row(result: DiffusionResult) -> str:
    item = result.family
    passed = "passed as `converter=`, for diffusers registers none" if item.explicit else ""
    cells = (
        item.key,
        item.kind,
        result.converter,
        f"`{item.prefix}`" if item.prefix else "",
        item.does,
        ", ".join(result.dtypes),
        str(result.parameters),
        str(result.tensors),
        f"{len(result.differences)} wrong" if result.differences else "identical",
        "; ".join(text for text in (passed, item.note) if text),
    )
    return f"| {' | '.join(cells)} |"
