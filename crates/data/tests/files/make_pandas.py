"""Writes the small tables of the tests as pandas does, with the index of a DataFrame in them.

    pip install pandas pyarrow
    python make_pandas.py

The files are committed: the tests need no Python.
"""

from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet

HERE = Path(__file__).parent

rows = [(3, 40.0, 2, 400.0), (0, 25.5, 1, 260.0), (7, 61.0, 3, 580.0), (1, 33.0, 2, 320.0)]
index = [row[0] for row in rows]
frame = pd.DataFrame(
    {"sqm": [row[1] for row in rows], "rooms": [row[2] for row in rows], "price": [row[3] for row in rows]}, index=index
)
frame.to_csv(HERE / "pandas_index.csv")
frame.to_parquet(HERE / "pandas_index.parquet", compression=None)
frame.rename_axis("id").to_parquet(HERE / "pandas_named_index.parquet", compression=None)
# An index of numbers that follow one another is no column.
frame.reset_index(drop=True).to_parquet(HERE / "pandas_range.parquet", compression=None)
table = pa.Table.from_pandas(frame)
with pa.OSFile(str(HERE / "pandas_index.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
    writer.write_table(table)
# What another program keeps: the columns, not what pandas says of them.
pa.parquet.write_table(table.replace_schema_metadata(None), HERE / "pandas_lost.parquet", compression="none")
