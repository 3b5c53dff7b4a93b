"""Files of tensors are those of the library safetensors, whoever writes which rows when."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from ncr_core.errors import CheckpointError
from ncr_core.tensor_files import ALIGNMENT, TensorLayout, map_tensors, write_tensors

TYPES = [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool]


def _tensor(dtype: torch.dtype, shape: list[int]) -> Tensor:
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape).to(dtype)


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=5).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 4), max_size=3)),
        max_size=4,
    )
)
def test_the_library_reads_what_is_written(
    shapes: dict[str, tuple[torch.dtype, list[int]]],
) -> None:
    tensors = {name: _tensor(*each) for name, each in shapes.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "some.safetensors"
        write_tensors(path, tensors)
        for found in (load_file(path), map_tensors(path)):
            assert found.keys() == tensors.keys()
            for name, value in tensors.items():
                assert found[name].dtype == value.dtype
                assert torch.equal(found[name], value)


@given(st.randoms(use_true_random=False), st.integers(1, 30), st.integers(1, 5))
def test_rows_written_in_any_order_are_the_whole(
    order: random.Random, rows: int, at_once: int
) -> None:
    tensors = {"a": torch.randn(rows, 3), "b": torch.arange(rows), "c": torch.randn(rows, 2, 2)}
    parts = [(name, first) for name in tensors for first in range(0, rows, at_once)]
    order.shuffle(parts)
    layout = TensorLayout.of(tensors)
    with tempfile.TemporaryDirectory() as folder:
        whole, by_rows = Path(folder) / "whole", Path(folder) / "rows"
        write_tensors(whole, tensors)
        with by_rows.open("wb") as file:
            layout.begin(file)
        for name, first in parts:  # each from a file of its own, as processes have
            with by_rows.open("r+b") as file:
                layout.write(file, name, tensors[name][first : first + at_once], first)
        assert by_rows.read_bytes() == whole.read_bytes()


def test_columns_of_a_tensor_are_written_as_they_look(tmp_path: Path) -> None:
    table = torch.arange(12.0).reshape(3, 4)
    views = {"columns": table[:, 1:3], "transposed": table.T, "column": table[:, 1]}
    write_tensors(tmp_path / "file", views | {"expanded": torch.ones(()).expand(3)})
    found = map_tensors(tmp_path / "file")
    assert found["column"].tolist() == [1, 5, 9]
    assert found["expanded"].tolist() == [1, 1, 1]
    assert found["columns"].tolist() == [[1, 2], [5, 6], [9, 10]]
    assert torch.equal(found["transposed"], table.T)


def test_a_mapped_tensor_takes_writes_that_the_file_does_not(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_tensors(path, {"table": torch.ones(1000, 64)})
    content = path.read_bytes()
    mapped = map_tensors(path)["table"]
    assert mapped.data_ptr() % ALIGNMENT == 0
    mapped[3] = 7
    assert path.read_bytes() == content


def test_a_file_that_is_cut_off_or_missing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_tensors(path, {"table": torch.ones(10, 2)})
    path.write_bytes(path.read_bytes()[:-1])
    for each in (path, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match=f"{each.name} of {tmp_path.name} is damaged"):
            map_tensors(each)
