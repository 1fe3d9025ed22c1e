"""Checkpoints as Hugging Face's transformers writes them: a folder with config.json and safetensors files.

The format of these files is eight bytes with the length of a header, the header, which is JSON, and the items. It is
read and written here because the package safetensors knows no bfloat16 in NumPy, and the demo has NumPy alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cuscan import _arrays

from .config import Config

Array = Any
_CODES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_EMBED, _HEAD = "backbone.embeddings.weight", "lm_head.weight"
# Read in float32 by the scan, whatever the activations are: a rounding of A or of the bias of delta acts at every step.
WIDE = ("A_log", ".D", "dt_proj.bias")


def load(folder: str | Path, *, xp: Any = np, dtype: str | None = None) -> tuple[Config, dict[str, Array]]:
    """Read a checkpoint of a MambaForCausalLM or FalconMambaForCausalLM.

    Parameters
    ----------
    folder : str or Path
        With config.json, and model.safetensors or model.safetensors.index.json and the files it names.
    xp : module
        numpy or cupy: where the parameters go.
    dtype : str, optional
        "float32", "bfloat16" or "float16": of the parameters, but for A_log, D and dt_proj.bias, which never become
        narrower than they are. Default: as they are; without the package ml_dtypes what is bfloat16 becomes float32.

    Returns
    -------
    Config
        The sizes.
    dict of str to array
        The parameters, by the names of `Config.shapes`.

    Raises
    ------
    FileNotFoundError
        A file that is not there.
    ModuleNotFoundError
        bfloat16 without ml_dtypes.
    ValueError
        Another dtype, another kind of model, a broken file, or parameters that are missing, left over, or of another
        shape than config.json says; all of them are listed.
    """
    if dtype is not None and dtype not in _CODES.values():
        raise ValueError(f"dtype must be one of {', '.join(_CODES.values())}, got {dtype!r}")
    kind = None if dtype is None else _arrays._dtype(dtype)  # noqa: SLF001
    folder = Path(folder)
    config = Config.from_json(json.loads((folder / "config.json").read_text()))
    found: dict[str, Array] = {}
    for file in _files(folder):
        found |= read(file)
    if "backbone.embedding.weight" in found:  # of the first checkpoints
        found[_EMBED] = found.pop("backbone.embedding.weight")
    if config.tied and _HEAD in found:
        head = found.pop(_HEAD)
        if _EMBED in found and not np.array_equal(_bits(head), _bits(found[_EMBED])):
            raise ValueError(f"{_HEAD} differs from {_EMBED}, which tie_word_embeddings says it is")
    check(config, found)
    return config, {name: xp.asarray(convert(name, found[name], kind)) for name in config.shapes()}


def save(
    folder: str | Path, config: Config, parameters: Mapping[str, Array], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a checkpoint that transformers and `load` read.

    Parameters
    ----------
    folder : str or Path
        Made if it is not there; config.json and model.safetensors in it are replaced.
    config : Config
        The sizes.
    parameters : mapping of str to array
        NumPy or CuPy arrays: float32, float16 or bfloat16.
    metadata : mapping of str to str, optional
        Written to the file's header.

    Raises
    ------
    ValueError
        Parameters that are missing, left over, or of another shape or type than `config` says.
    """
    host = {name: x if isinstance(x, np.ndarray) else x.get() for name, x in parameters.items()}
    check(config, host, _CODES.values())
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    types = {x.dtype.name for name, x in host.items() if not name.endswith(WIDE)}
    written = {**config.to_json(), "dtype": types.pop()} if len(types) == 1 else config.to_json()
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    write(folder / _WEIGHTS, host, {"format": "pt", **(metadata or {})})


def check(config: Config, found: Mapping[str, Array], types: Iterable[str] = ()) -> None:
    """Raise a ValueError that lists every parameter which is missing, left over, or of another shape or type."""
    shapes = config.shapes()
    wrong = [f"missing: {name} {shape}" for name, shape in shapes.items() if name not in found]
    wrong += [f"left over: {name} {tuple(x.shape)}" for name, x in found.items() if name not in shapes]
    wrong += [
        f"wrong shape: {name} {tuple(found[name].shape)}, expected {shape}"
        for name, shape in shapes.items()
        if name in found and tuple(found[name].shape) != shape
    ]
    wrong += [
        f"wrong type: {name} {x.dtype.name}, expected {', '.join(types)}"
        for name, x in found.items()
        if types and name in shapes and x.dtype.name not in types
    ]
    if wrong:
        raise ValueError("the parameters do not fit the configuration:\n  " + "\n  ".join(wrong))


def convert(name: str, x: Array, dtype: Any) -> Array:
    """The parameter in the given dtype, or as it is if the scan reads it in float32 and the dtype is narrower."""
    if dtype is None or (name.endswith(WIDE) and np.dtype(dtype).itemsize < 4):
        return x
    return x.astype(dtype, copy=False)


def read(file: Path) -> dict[str, Array]:
    """The arrays of a safetensors file, as views of the file in memory; bfloat16 without ml_dtypes as float32.

    Raises
    ------
    ValueError
        A file that is cut off, or whose header is not one.
    """
    header, start = _header(file)
    size = file.stat().st_size - start
    data = np.memmap(file, np.uint8, "r", start, size) if size else np.empty(0, np.uint8)
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        code, shape = entry["dtype"], tuple(entry["shape"])
        item = _CODES.get(code)
        if item is None:
            raise ValueError(f"{file}: {name} is of type {code}, expected {', '.join(_CODES)}")
        nbytes = math.prod(shape) * (4 if item == "float32" else 2)
        if not 0 <= begin <= end <= size or end - begin != nbytes:
            raise ValueError(f"{file}: {name} has bytes {begin} to {end} of {size}, and {nbytes} by its shape and type")
        found[name] = _items(data[begin:end], item).reshape(shape)
    return found


def metadata(file: Path) -> dict[str, str]:
    """What the writer of a safetensors file noted in it."""
    return dict(_header(file)[0].get("__metadata__", {}))


def write(file: Path, arrays: Mapping[str, Array], notes: Mapping[str, str]) -> None:
    """A safetensors file, in the place of an older one only when it is whole: `read` may have views of that."""
    codes = {item: code for code, item in _CODES.items()}
    header: dict[str, Any] = {"__metadata__": dict(notes)}
    end = 0
    for name, x in arrays.items():
        begin, end = end, end + x.nbytes
        header[name] = {"dtype": codes[x.dtype.name], "shape": list(x.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    partial = file.with_name(file.name + ".partial")
    with partial.open("wb") as to:
        to.write(len(text).to_bytes(8, "little") + text)
        for x in arrays.values():
            to.write(np.ascontiguousarray(x).tobytes())
    partial.replace(file)


def bfloat16() -> np.dtype[Any] | None:
    """The dtype, if ml_dtypes is there."""
    try:
        import ml_dtypes
    except ImportError:
        return None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """And where the items begin."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length + 8 > file.stat().st_size:
            raise ValueError(f"{file} is no safetensors file, or is cut off")
        try:
            header: dict[str, Any] = json.loads(opened.read(length))
        except ValueError as error:
            raise ValueError(f"{file} is no safetensors file: {error}") from None
    return header, length + 8


def _items(data: Array, item: str) -> Array:
    if item != "bfloat16":
        return data.view(item)
    dtype = bfloat16()
    if dtype is not None:
        return data.view(dtype)
    return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _bits(x: Array) -> Array:
    return x.view(np.uint8) if x.flags.c_contiguous else np.ascontiguousarray(x).view(np.uint8)


def _files(folder: Path) -> Iterable[Path]:
    index = folder / _INDEX
    if (folder / _WEIGHTS).exists() or not index.exists():
        return [folder / _WEIGHTS]
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return [folder / name for name in names]
