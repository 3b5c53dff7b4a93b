"""Files of safetensors that are written in parts, by one process or several, and mapped to read.

The library `safetensors` writes whole tensors alone. The format is its own: the length of a header
in eight bytes, the header in JSON, and the tensors one after the other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ncr_core.errors import CheckpointError

ALIGNMENT = 64  # bytes, of the first tensor in the file
BLOCK_BYTES = 2**26  # copied from a device at a time
_TYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}  # the largest first, so that the size of each tensor keeps the next one aligned


class TensorLayout:
    """The places of tensors in a file, which follow from their names, types and shapes alone.

    Several processes that know the shapes can therefore write parts of one file.
    """

    def __init__(self, tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> None:
        """The layout of tensors of these types and shapes. Raises ValueError for other types."""
        header: dict[str, Any] = {}
        order = list(_TYPES)
        starts, end = {}, 0
        for name, (dtype, shape) in sorted(
            tensors.items(), key=lambda each: (order.index(each[1][0]), each[0])
        ):
            size = dtype.itemsize * math.prod(shape)
            header[name] = {
                "dtype": _TYPES[dtype],
                "shape": list(shape),
                "data_offsets": [end, end + size],
            }
            starts[name], end = end, end + size
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        self._header = len(text).to_bytes(8, "little") + text
        self._starts = starts
        self._bytes = end

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> TensorLayout:
        """The layout of these tensors; a DTensor counts as the whole tensor."""
        return cls({name: (value.dtype, value.shape) for name, value in tensors.items()})

    def begin(self, file: IO[bytes]) -> None:
        """Writes the header, and gives the file its size. Raises OSError."""
        file.seek(0)
        file.write(self._header)
        file.truncate(len(self._header) + self._bytes)

    def write(self, file: IO[bytes], name: str, rows: Tensor, first: int = 0) -> None:
        """Writes rows of a tensor, the first of which is row ``first`` of the whole tensor.

        Raises OSError.
        """
        values = rows.detach().contiguous().reshape(-1)
        row_bytes = rows.element_size() * math.prod(rows.shape[1:])
        file.seek(len(self._header) + self._starts[name] + first * row_bytes)
        for block in torch.split(values, BLOCK_BYTES // rows.element_size()):
            if len(block):
                file.write(block.cpu().view(torch.uint8).numpy().data)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a file of whole tensors, and copies those alone that are not contiguous.

    Raises OSError.
    """
    layout = TensorLayout.of(tensors)
    with path.open("wb") as file:
        layout.begin(file)
        for name, value in tensors.items():
            layout.write(file, name, value)


def map_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, mapped into memory that processes share.

    A caller may write to a tensor; the file stays unchanged.

    Raises:
        CheckpointError: The file is missing, damaged, or of another length than its header says.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path.name} of {path.parent.name} is damaged: {error}") from None
