"""What `chairlift serve` can be told, and the three ways of telling it.

`fields.py` holds one class, `Configuration`, in which a setting is one field: its type, its default, its help
and its group. From the field come

- the flag, `--max-num-seqs` (`flags.py`), with its range or choices, and its place in `serve --help`;
- the environment variable, `CHAIRLIFT_MAX_NUM_SEQS`, and the key in a TOML file, `max_num_seqs` (`read.py`);
- the line that `chairlift config` prints (`written.py`);
- the row in docs/configuration.md (`python -m tests.server.configuration.table` writes it).

To add a setting, add a field to `Configuration`, use it in `serving.py`, which makes of the outcome what the
server is built from, and write the table. `Annotated[type, About(group, help)]` is all that a field needs:

- a range is pydantic's `Field(ge=1, le=9)`; choices are a `StrEnum`; a size in bytes is `Size`; a path is an
  `ExistingFile`, `ExistingFolder` or `Folder` (all in `types.py`);
- a flag that may be repeated is a `tuple[str, ...]`: an array in the file, commas in the environment;
- a secret is a `SecretStr` (or a tuple of them): it is never printed;
- a table that a flag cannot spell has `About(flag=False)`;
- a check of its own is an `AfterValidator` that raises `ValueError`; one that looks at another field is a
  `field_validator` that finds it in `info.data`, where all fields declared earlier are.
"""
