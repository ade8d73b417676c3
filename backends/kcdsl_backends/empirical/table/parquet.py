"""Untrusted Parquet files: read whole, unless few bytes expand to more than the memory.

Runs, dictionaries and compression may expand a kilobyte to gigabytes. Outputs of kernels do not
repeat in that way.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_ROWS = 2**20
_VALUES = 2**27
_BYTES = 2**30
"""Limits of rows, values and bytes of texts for a file of any size."""
_PER_BYTE = 64
"""Limit of values, and of bytes of texts, per byte of a larger file; of rows, one."""


def read_parquet(data: bytes) -> pa.Table:
    """Return a Parquet file as a table.

    Raises ValueError if it exceeds the limits for its size, and an ArrowException or OSError if it
    is damaged.
    """
    with pq.ParquetFile(pa.BufferReader(data)) as file:
        about, schema = file.metadata, file.schema_arrow
    groups = [about.row_group(number) for number in range(about.num_row_groups)]
    chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
    _refuse(about.num_rows, "rows", max(_ROWS, len(data)), data)
    values = sum(chunk.num_values for chunk in chunks)
    _refuse(values, "values", max(_VALUES, _PER_BYTE * len(data)), data)
    most = max(_BYTES, _PER_BYTE * len(data))
    unpacked = sum(chunk.total_uncompressed_size for chunk in chunks)
    _refuse(unpacked, "bytes without compression", most, data)
    texts = {chunk.path_in_schema for chunk in chunks if chunk.physical_type == "BYTE_ARRAY"}
    texts &= set(schema.names)  # Arrow cannot read dictionaries inside of lists in several parts
    with pq.ParquetFile(pa.BufferReader(data), read_dictionary=sorted(texts)) as file:
        found = file.read(use_threads=False)
    repeated = sum(_size(part) for name in sorted(texts) for part in found.column(name).chunks)
    _refuse(repeated, "bytes of text", most, data)
    return found.cast(schema)


def _refuse(held: int, what: str, most: int, data: bytes) -> None:
    if held > most:
        raise ValueError(f"it holds {held} {what} in {len(data)} bytes")


def _size(part: pa.DictionaryArray) -> int:
    """Return the number of bytes of texts without a dictionary."""
    lengths = pc.binary_length(part.dictionary).cast(pa.int64())
    return int(pc.sum(lengths.take(part.indices)).as_py() or 0)
