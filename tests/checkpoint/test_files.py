from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from vllm_deepinfer.checkpoint.errors import CheckpointError
from vllm_deepinfer.checkpoint.files import BYTES_PER_ELEMENT, Header, read_headers, write_file

from .samples import sentence

ARRAYS: dict[str, NDArray[Any]] = {
    "weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "bytes": np.arange(5, dtype=np.uint8),
    "signed": np.array([[-1, 2]], dtype=np.int8),
    "empty": np.zeros((0, 4), dtype=np.float32),
    "scalar": np.array(7.0, dtype=np.float32),
}
HEADERS = {
    "weight": Header("F32", (2, 3)),
    "bytes": Header("U8", (5,)),
    "signed": Header("I8", (1, 2)),
    "empty": Header("F32", (0, 4)),
    "scalar": Header("F32", ()),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    write_file(path, HEADERS, ARRAYS.items())
    return path


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_headers(path)
    message = sentence(caught.value)
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


def test_the_library_reads_what_we_write(file: Path) -> None:
    with safe_open(file, framework="np") as opened:
        assert set(opened.keys()) == set(ARRAYS)
        assert opened.metadata() == {"format": "pt"}
        for name, array in ARRAYS.items():
            assert np.array_equal(opened.get_tensor(name), array)


def test_we_read_what_the_library_writes(tmp_path: Path) -> None:
    save_file(ARRAYS, tmp_path / "theirs.safetensors")
    assert read_headers(tmp_path / "theirs.safetensors") == HEADERS


def test_round_trip(file: Path) -> None:
    assert read_headers(file) == HEADERS


def test_data_starts_on_a_multiple_of_eight(file: Path) -> None:
    assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0


def test_types_without_a_numpy_counterpart(tmp_path: Path) -> None:
    headers = {
        "a": Header("BF16", (2, 2)),
        "b": Header("F8_E4M3", (3,)),
        "c": Header("F8_E8M0", (1, 1)),
    }
    arrays: dict[str, NDArray[Any]] = {
        "a": np.array([[1, 2], [3, 4]], dtype=np.uint16),
        "b": np.array([5, 6, 7], dtype=np.uint8),
        "c": np.array([[127]], dtype=np.uint8),
    }
    path = tmp_path / "model.safetensors"
    write_file(path, headers, arrays.items())
    assert read_headers(path) == headers
    assert path.read_bytes()[-12:] == bytes([1, 0, 2, 0, 3, 0, 4, 0, 5, 6, 7, 127])


def test_big_endian_arrays_are_turned(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_file(path, {"a": Header("F32", (1,))}, [("a", np.array([1.0], dtype=">f4"))])
    assert path.read_bytes()[-4:] == b"\x00\x00\x80\x3f"


@pytest.mark.parametrize(
    "arrays",
    [
        [("weight", ARRAYS["bytes"])],
        [("bytes", ARRAYS["bytes"]), ("weight", ARRAYS["weight"])],
        [("weight", ARRAYS["weight"].astype(np.float64))],
        [("weight", ARRAYS["weight"])],
        [],
    ],
)
def test_arrays_must_be_the_announced_ones(tmp_path: Path, arrays: list[tuple[str, NDArray[Any]]]) -> None:
    headers = {"weight": HEADERS["weight"], "bytes": HEADERS["bytes"]}
    with pytest.raises(ValueError, match="announce"):
        write_file(tmp_path / "model.safetensors", headers, arrays)


def test_one_array_too_many(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="announces"):
        write_file(tmp_path / "model.safetensors", {}, [("scalar", ARRAYS["scalar"])])


@given(cut=st.integers(0, 10_000))
def test_a_file_cut_anywhere(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "model.safetensors"
    write_file(path, HEADERS, ARRAYS.items())
    whole = path.read_bytes()
    path.write_bytes(whole[: cut % len(whole)])
    assert refused(path).endswith("download it again")


def test_a_file_with_a_tail(file: Path) -> None:
    size = file.stat().st_size
    file.write_bytes(file.read_bytes() + b"x")
    assert refused(file).startswith(f" has {size + 1} bytes, but its header describes {size}: ")


def test_no_file(tmp_path: Path) -> None:
    assert refused(tmp_path / "nowhere").startswith(" cannot be read (No such file or directory): ")


@pytest.mark.parametrize("content", [b"", b"\x05\x00", b"\x93NUMPY" + bytes(100), b"\xff" * 64])
def test_no_safetensors_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert refused(path) == " is no safetensors file: download it again"


def with_header(path: Path, header: Any, data: bytes = b"") -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    return path


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]} | changes


@pytest.mark.parametrize(
    "header",
    [
        b"{not json",
        b"\xff\xfe{}",
        [1, 2],
        {"a": 3},
        {"a": {}},
        {"a": entry(dtype="F7")},
        {"a": entry(dtype=None)},
        {"a": entry(shape="2")},
        {"a": entry(shape=[-2])},
        {"a": entry(shape=[-1, -2])},
        {"a": entry(data_offsets=[0, 3])},
        {"a": entry(data_offsets=[0])},
        {"a": entry(data_offsets=[-2, 0])},
        {"a": entry(), "b": entry()},
        {"a": entry(), "b": entry(data_offsets=[3, 5])},
    ],
)
def test_a_damaged_header(tmp_path: Path, header: Any) -> None:
    message = refused(with_header(tmp_path / "model.safetensors", header, bytes(8)))
    assert message.startswith(" has a damaged header (")


def test_the_damaged_entry_is_named(tmp_path: Path) -> None:
    path = with_header(tmp_path / "model.safetensors", {"a": entry(), "b": entry(shape=[9])}, bytes(4))
    assert refused(path) == " has a damaged header (entry b): download it again"


def test_metadata_is_no_tensor(tmp_path: Path) -> None:
    path = with_header(tmp_path / "model.safetensors", {"__metadata__": {"k": "v"}, "a": entry()}, b"xy")
    assert read_headers(path) == {"a": Header("U8", (2,))}


def test_a_header_is_read_without_the_data(tmp_path: Path) -> None:
    """A real shard has gigabytes: a file with a hole in place of its data is as good."""
    size = 1 << 34
    path = with_header(tmp_path / "model.safetensors", {"a": entry(shape=[size], data_offsets=[0, size])})
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size + size)
    assert read_headers(path) == {"a": Header("U8", (size,))}


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("F32", 4), ("BF16", 2), ("F16", 2), ("F8_E4M3", 1), ("F8_E8M0", 1), ("I8", 1), ("I64", 8)],
)
def test_sizes_of_types(dtype: str, size: int) -> None:
    assert BYTES_PER_ELEMENT[dtype] == size
    assert Header(dtype, (3, 5)).nbytes == 15 * size
