"""Formats of text: which file is what, and how its documents are read, a bounded part at a time.

`source` has what all of them need; `compressed` decompresses, `records` reads lines and lists of
JSON and tables of text, `columns` Parquet and Arrow, `token_files` ids that were made elsewhere,
`remote` object storage. `formats` knows all of them, by their names.
"""
