"""Where articles come from: the demo files, the hub, MLCommons JSON, local parquet or JSONL.

A synthetic set has no articles; its rows are in :mod:`fp8flow.synthetic_data`.

Every source is an iterator, so that memory stays bounded whatever the number of rows.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

from fp8flow.errors import FlowError
from fp8flow.log import get_logger
from fp8flow.synthetic_data import SYNTHETIC, Lengths

Split = Literal["validation", "calibration"]
Item = TypeVar("Item")

CHECKOUT = Path(__file__).resolve().parents[3]
DEMO_FILES: dict[str, Path] = {
    "validation": CHECKOUT / "resources" / "demo" / "validation.jsonl",
    "calibration": CHECKOUT / "resources" / "demo" / "calibration.jsonl",
}
COLUMNS = ("id", "article", "highlights")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_BATCH_ROWS = 1024
_CHUNK_CHARACTERS = 1 << 20
_LARGEST_ITEM_CHARACTERS = 1 << 26


@dataclass(frozen=True)
class Article:
    """One row of a source.

    Attributes:
        id: document id; SHA-1 of the article's UTF-8 text where the source has none.
        text: the article.
        highlights: reference summary; None where the source has none.
        where: place in the source, for messages.
        token_ids: token ids of the prompt as the source gives them; None where it gives none.
    """

    id: str
    text: str
    highlights: str | None
    where: str
    token_ids: list[int] | None = None


@dataclass(frozen=True)
class Source:
    """What to read: the ``source`` of a config section with all that belongs to it.

    Attributes:
        kind: demo, hub, mlcommons, file or synthetic.
        section: config section, for messages.
        split: part of the demo or hub data set.
        path: file of the kinds mlcommons and file.
        hub_id: data set id of the kind hub.
        revision: configuration of the hub data set, for example 3.0.0.
        lengths: lengths of the kind synthetic.
    """

    kind: str
    section: str
    split: str
    path: Path | None = None
    hub_id: str = ""
    revision: str = ""
    lengths: Lengths | None = None

    @property
    def file(self) -> Path | None:
        """The local file that rows are read from; None for the hub and for random tokens.

        Raises:
            FlowError: if it is not configured or does not exist.
        """
        if self.kind in ("hub", SYNTHETIC):
            return None
        path = DEMO_FILES[self.section_split] if self.kind == "demo" else self.path
        if path is None:
            raise FlowError(
                f"{self.section}.source is {self.kind}: give the file as {self.section}.path"
            )
        if not path.is_file():
            raise FlowError(f"{self.section}.path: {path} is not a file")
        if path.stat().st_size == 0:
            raise FlowError(f"{self.section}.path: {path} is empty")
        return path

    @property
    def section_split(self) -> Split:
        """Which demo file belongs to the section."""
        return "calibration" if self.section == "calibration" else "validation"

    @property
    def is_synthetic(self) -> bool:
        """Whether the rows are random tokens instead of articles."""
        return self.kind == SYNTHETIC

    @property
    def has_ids(self) -> bool:
        """Whether the source names its documents; the MLCommons files do not."""
        return self.kind != "mlcommons"

    def rows(self) -> Iterator[Article]:
        """Yield all rows in order.

        Raises:
            FlowError: naming the first row that cannot be read, or what is missing.
        """
        file = self.file
        if file is None:
            return _hub_rows(self)
        if self.kind == "mlcommons":
            return _mlcommons_rows(file)
        if file.suffix.lower() == ".parquet":
            return _parquet_rows(file, self.section)
        if file.suffix.lower() in (".jsonl", ".ndjson", ".json"):
            return _jsonl_rows(file)
        raise FlowError(
            f"{self.section}.path: {file.name} has an unknown type; allowed: .parquet, .jsonl"
        )


def batches(items: Iterator[Item], size: int) -> Iterator[list[Item]]:
    """Yield lists of up to ``size`` items."""
    while batch := list(islice(items, size)):
        yield batch


def text_id(text: str) -> str:
    """Return the id of a document whose source has none: SHA-1 of its UTF-8 text."""
    return hashlib.sha1(text.encode("utf-8", "surrogatepass"), usedforsecurity=False).hexdigest()


def _text(row: Mapping[str, Any], key: str, where: str) -> str:
    value = row.get(key)
    if isinstance(value, str):
        if _LONE_SURROGATE.search(value):
            raise FlowError(f"{where}: {key!r} has half a surrogate pair, which is no character")
        return value
    if key not in row:
        raise FlowError(f"{where} has no {key!r}; it has: {', '.join(map(str, row)) or 'nothing'}")
    raise FlowError(f"{where}: {key!r} must be text, not {type(value).__name__}")


def _article(row: Any, where: str) -> Article:
    if not isinstance(row, Mapping):
        raise FlowError(f"{where} must be an object with id, article, highlights")
    identity = row.get("id")
    if identity is None or isinstance(identity, bool) or not isinstance(identity, str | int):
        raise FlowError(f"{where}: 'id' must be text or a whole number, not {identity!r}")
    text = _text(row, "article", where)
    return Article(str(identity), text, _text(row, "highlights", where), where)


def _open_text(path: Path) -> IO[str]:
    # utf-8-sig drops the byte order mark that Windows editors put in front.
    return path.open(encoding="utf-8-sig", newline="\n")


def _jsonl_rows(path: Path) -> Iterator[Article]:
    with _open_text(path) as stream:
        try:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    where = f"{path}, line {number}"
                    try:
                        row = json.loads(line)
                    except ValueError as error:
                        raise FlowError(f"{where} is not JSON: {error}") from error
                    yield _article(row, where)
        except UnicodeDecodeError as error:
            raise FlowError(f"{path} is not UTF-8 text: {error}") from error


def _parquet_rows(path: Path, section: str) -> Iterator[Article]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise FlowError(f"{section}.path: {path} is not a parquet file: {error}") from error
    with file:
        _require_columns(str(path), file.schema_arrow.names)
        try:
            batches_read = file.iter_batches(_BATCH_ROWS, columns=list(COLUMNS))
            rows = (row for batch in batches_read for row in batch.to_pylist())
            for number, row in enumerate(rows):
                yield _article(row, f"{path}, row {number}")
        except (pa.ArrowInvalid, OSError) as error:
            raise FlowError(f"{section}.path: {path} is damaged: {error}") from error


def _require_columns(where: str, names: list[str]) -> None:
    if missing := [name for name in COLUMNS if name not in names]:
        raise FlowError(
            f"{where} lacks the column(s) {', '.join(missing)}; it has: {', '.join(names)}"
        )


def _hub_rows(source: Source) -> Iterator[Article]:
    import datasets

    what = f"{source.hub_id}, configuration {source.revision}, split {source.split}"
    get_logger(__name__).info("loading %s", what)
    try:
        data = datasets.load_dataset(source.hub_id, name=source.revision, split=source.split)
    except Exception as error:  # the hub client raises many kinds; all mean the same here
        raise FlowError(
            f"the data set {what} cannot be loaded: {error}\n"
            "Check dataset.id, dataset.revision, dataset.split and the network (HF_HUB_OFFLINE, "
            "HF_HOME), or use source: file or mlcommons with a local copy."
        ) from error
    _require_columns(what, data.column_names)
    tables = data.select_columns(list(COLUMNS)).with_format("arrow").iter(_BATCH_ROWS)
    numbered = enumerate(row for table in tables for row in table.to_pylist())
    for index, row in numbered:
        yield _article(row, f"{source.hub_id}, row {index}")


def _mlcommons_rows(path: Path) -> Iterator[Article]:
    for index, item in enumerate(json_items(path)):
        where = f"{path}, item {index}"
        if not isinstance(item, dict):
            raise FlowError(f"{where} must be an object with input, tok_input, output")
        text = _text(item, "input", where)
        ids = item.get("tok_input")
        if ids is not None and not (
            isinstance(ids, list) and all(type(token) is int for token in ids)
        ):
            raise FlowError(f"{where}: 'tok_input' must be a list of token ids")
        yield Article(text_id(text), text, _text(item, "output", where), where, ids)


def json_items(path: Path) -> Iterator[Any]:
    """Yield the items of a JSON array without holding the whole file.

    The MLCommons files are hundreds of megabytes, most of it white space around token ids.

    Raises:
        FlowError: if the file is not a JSON array, naming the item at which it breaks.
    """
    decoder = json.JSONDecoder()
    with _open_text(path) as stream:
        buffer = _Buffer(stream, path)
        if buffer.skip() != "[":
            raise FlowError(f"{path} must be a JSON array of objects")
        buffer.take(1)
        index = 0
        while (mark := buffer.skip()) != "]":
            if index and mark == ",":
                buffer.take(1)
                buffer.skip()
            elif index:
                raise FlowError(f"{path} is not JSON after item {index - 1}: it is cut or damaged")
            yield buffer.decode(decoder, index)
            index += 1


class _Buffer:
    """Text of a file that is read as far as needed."""

    def __init__(self, stream: IO[str], path: Path) -> None:
        self._stream, self._path = stream, path
        self._text, self._position = "", 0

    def _read(self) -> bool:
        try:
            more = self._stream.read(_CHUNK_CHARACTERS)
        except UnicodeDecodeError as error:
            raise FlowError(f"{self._path} is not UTF-8 text: {error}") from error
        self._text, self._position = self._text[self._position :] + more, 0
        return bool(more)

    def skip(self) -> str:
        """Skip white space; return the next character, or an empty text at the end."""
        while True:
            while self._position < len(self._text):
                character = self._text[self._position]
                if character not in " \t\r\n":
                    return character
                self._position += 1
            if not self._read():
                return ""

    def take(self, count: int) -> None:
        """Step over characters."""
        self._position += count

    def decode(self, decoder: json.JSONDecoder, index: int) -> Any:
        """Return the JSON value at the current position."""
        while True:
            try:
                value, end = decoder.raw_decode(self._text, self._position)
            except ValueError as error:
                too_long = len(self._text) - self._position > _LARGEST_ITEM_CHARACTERS
                if too_long or not self._read():
                    raise FlowError(
                        f"{self._path}, item {index} is not JSON: {error.args[0]}; "
                        "the file is cut or damaged"
                    ) from error
            else:
                self._position = end
                return value
