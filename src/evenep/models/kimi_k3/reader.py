"""Reads chosen tensors of safetensors shards straight into the memory they are for.

A safetensors file is 8 bytes of little-endian header length N, N bytes of JSON (name -> dtype,
shape, data_offsets relative to byte 8 + N), then the data. The reader sorts the wanted tensors by
offset, joins neighbours into one ``preadv`` with one destination buffer per tensor, and touches
no other byte: no mapping, no staging copy, so a rank's memory is its own share.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import CheckpointError, InputError, explain
from ...weights.source import Progress
from .index import INDEX_NAME, CheckpointIndex
from .names import Entry

MAX_HEADER = 100_000_000  # the format's own limit
MAX_BUFFERS = 1024  # IOV_MAX
MAX_RUN = 256 << 20  # bytes per call, so that progress is reported a few times a second
TORCH_DTYPES = {"U8": torch.uint8, "BF16": torch.bfloat16, "F32": torch.float32}


class Stored(NamedTuple):
    """One tensor of a shard; ``begin`` and ``end`` are absolute file offsets."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring bytes of a file and the buffers they go to, in file order."""

    begin: int
    buffers: list[NDArray[np.uint8]]

    @property
    def nbytes(self) -> int:
        """Bytes of the run."""
        return sum(b.nbytes for b in self.buffers)


def read_header(file: Path) -> dict[str, Stored]:
    """Parse and check a shard's header.

    Raises:
        CheckpointError: the file is absent, cut short, or its header is not what the format says.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(MAX_HEADER, size - 8):
                raise _broken(file, "bad header length", f"<= {max(0, size - 8)}", length)
            document = json.loads(stream.read(length))
        stored = {
            name: _stored(file, name, fields, 8 + length, size)
            for name, fields in document.items()
            if name != "__metadata__"
        }
    except FileNotFoundError as error:
        raise CheckpointError(
            explain(
                "the index names a shard that is not there",
                where=str(file), expected="the file", got="nothing",
                fix="finish the download, or ask for layers whose shards are here",
            )
        ) from error  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _broken(file, f"unreadable header: {error!r}", "a safetensors file", None) from error
    return stored


def _broken(file: Path, what: str, expected: object, got: object) -> CheckpointError:
    return CheckpointError(
        explain(what, where=str(file), expected=expected, got=got, fix="download the shard again")
    )


def _stored(file: Path, name: str, fields: Any, start: int, size: int) -> Stored:
    begin, end = (start + int(offset) for offset in fields["data_offsets"])
    if not start <= begin <= end <= size:
        raise _broken(
            file, f"{name} lies outside the file", f"within {size} bytes", f"{begin}..{end}"
        )
    return Stored(fields["dtype"], tuple(fields["shape"]), begin, end)


class CheckpointReader:
    """Reads tensors of one checkpoint; cheap to make, keeps the last header it parsed."""

    def __init__(self, index: CheckpointIndex) -> None:
        self.index = index
        self._in_shard = Counter(index.shard_of.values())
        # one attribute, replaced whole: ranks that are threads may share a reader
        self._last: tuple[str, dict[str, Stored]] = ("", {})

    def read(
        self, wanted: Sequence[tuple[Entry, Tensor]], progress: Progress | None = None
    ) -> None:
        """Fill each tensor from its entry, in place.

        Args:
            wanted: table entries and their destinations: contiguous CPU tensors of the entry's
                dtype and shape.
            progress: called with the bytes just read, their sum is the size of ``wanted``.

        Raises:
            InputError: a destination has the wrong dtype, shape, layout or device.
            CheckpointError: a shard is absent, broken, or holds another dtype or shape.
        """
        shards: dict[str, list[tuple[Stored, NDArray[np.uint8]]]] = {}
        for entry, tensor in wanted:
            shard = self.index.shard_of[entry.name]
            place = (self._locate(shard, entry), _bytes_of(entry, tensor))
            shards.setdefault(shard, []).append(place)
        for shard, places in shards.items():
            file = self.index.path / shard
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for run in coalesce(places):
                    _read_run(descriptor, run, file)
                    if progress:
                        progress(run.nbytes)
            finally:
                os.close(descriptor)

    def header(self, shard: str) -> dict[str, Stored]:
        """A shard's header, checked against the index: the same names, no more and no fewer.

        Raises:
            CheckpointError: absent or broken shard; a tensor the index puts elsewhere (a
                duplicate), doesn't know (an extra), or promises in vain.
        """
        known, found = self._last
        if known != shard:
            found = read_header(self.index.path / shard)
            self._check_names(shard, found)
            self._last = (shard, found)
        return found

    def _check_names(self, shard: str, found: dict[str, Stored]) -> None:
        where, owner = str(self.index.path / shard), self.index.shard_of
        for name in found:
            if owner.get(name) != shard:
                other = owner.get(name)
                what = f"{name} is in two shards" if other else f"unexpected tensor {name}"
                raise CheckpointError(
                    explain(
                        what, where=where, expected=other or f"only tensors of {INDEX_NAME}",
                        got=shard, fix="regenerate the index, or remove the extra tensor",
                    )
                )  # fmt: skip
        if len(found) != self._in_shard[shard]:
            lost = next(n for n, s in owner.items() if s == shard and n not in found)
            raise CheckpointError(
                explain(
                    f"{lost} is not in the shard the index names",
                    where=where, expected=f"{self._in_shard[shard]} tensors", got=len(found),
                    fix="download the shard again, it belongs to another export",
                )
            )  # fmt: skip

    def _locate(self, shard: str, entry: Entry) -> Stored:
        stored = self.header(shard)[entry.name]
        if (stored.dtype, stored.shape) != (entry.dtype, entry.shape):
            raise CheckpointError(
                explain(
                    f"wrong dtype or shape of {entry.name}",
                    where=str(self.index.path / shard),
                    expected=f"{entry.dtype} {list(entry.shape)}",
                    got=f"{stored.dtype} {list(stored.shape)}",
                    fix="use a checkpoint whose tensors follow its config.json",
                )
            )
        if stored.end - stored.begin != entry.nbytes:
            raise _broken(
                self.index.path / shard, f"wrong byte count of {entry.name}", entry.nbytes,
                stored.end - stored.begin,
            )  # fmt: skip
        return stored


def _bytes_of(entry: Entry, tensor: Tensor) -> NDArray[np.uint8]:
    """The destination's own memory as flat bytes."""
    dtype = TORCH_DTYPES[entry.dtype]
    fits = tensor.dtype == dtype and math.prod(tensor.shape) == math.prod(entry.shape)
    if not (fits and tensor.is_contiguous() and tensor.device.type == "cpu"):
        raise InputError(
            explain(
                f"bad destination for {entry.name}",
                where="CheckpointReader.read",
                expected=f"a contiguous CPU {dtype} {list(entry.shape)}",
                got=f"{tensor.device} {tensor.dtype} {list(tensor.shape)}, "
                f"strides {tensor.stride()}",
            )
        )
    flat: NDArray[np.uint8] = tensor.detach().view(-1).view(torch.uint8).numpy()
    return flat


def coalesce(places: Iterable[tuple[Stored, NDArray[np.uint8]]]) -> list[Run]:
    """Sort by offset and join what touches; gaps, which belong to others, split runs."""
    runs: list[Run] = []
    end, room = -1, 0
    for stored, buffer in sorted(places, key=lambda place: place[0].begin):
        if stored.begin != end or len(runs[-1].buffers) == MAX_BUFFERS or buffer.nbytes > room:
            runs.append(Run(stored.begin, []))
            room = MAX_RUN
        runs[-1].buffers.append(buffer)
        end, room = stored.end, room - buffer.nbytes
    return runs


def _read_run(descriptor: int, run: Run, file: Path) -> None:
    buffers, offset = [b.data for b in run.buffers], run.begin
    while buffers:
        done = os.preadv(descriptor, buffers, offset)
        if done == 0:
            raise _broken(file, "the file ends early", f"{run.nbytes} bytes at {run.begin}", offset)
        offset += done
        while buffers and done >= buffers[0].nbytes:
            done -= buffers.pop(0).nbytes
        if done:
            buffers[0] = buffers[0][done:]
