"""Sentence splitting for ROUGE-Lsum with NLTK's Punkt model, without NLTK's download host.

The English Punkt parameters (NLTK data package ``punkt_tab``, MIT licence) travel with the code
and are checked against their digests, so that scores do not depend on what is installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from fp8flow.errors import FlowError
from fp8flow.records import sha256_file
from fp8flow.spec import canonical_json, sha256_text

RESOURCE = "resources/nltk/punkt_tab/english"
FOLDER = Path(__file__).resolve().parents[3] / RESOURCE

# From punkt_tab.zip of nltk/nltk_data, SHA-256
# e57f64187974277726a3417ca6f181ec5403676c717672eef6a748a7b20e0106.
FILES = {
    "abbrev_types.txt": "92a3e070f43d9b4c5534758ca40ad7343b04e7e29bfe0c2eb658a39445a4f779",
    "collocations.tab": "8e2da1225e4dd2cc9dba261ee231ccb134859e21b46006e7f472c5ee269af0cf",
    "ortho_context.tab": "4bbcca25ed3d3f06c02402abf8419b9f033b8adc06e7b482eca4e45f81a5dc4c",
    "sent_starters.txt": "f3f8535483e1dba487241b764945168123bca3209a9645e59acd1225dc76edac",
}


class Splitter(Protocol):
    """What splits a text into sentences."""

    def tokenize(self, text: str) -> list[str]:
        """Return the sentences of ``text`` in order."""


def check_files(folder: Path = FOLDER) -> None:
    """Compare the shipped parameters with their digests.

    Raises:
        FlowError: naming the file that is missing or differs.
    """
    for name, expected in FILES.items():
        path = folder / name
        if not path.is_file():
            raise FlowError(f"{path} is missing; restore it with: git checkout -- {RESOURCE}")
        if sha256_file(path) != expected:
            raise FlowError(
                f"{path} differs from NLTK's punkt_tab, so scores would not be comparable; "
                f"restore it with: git checkout -- {RESOURCE}"
            )


def load_splitter(folder: Path = FOLDER) -> Splitter:
    """Return the splitter that ``nltk.sent_tokenize`` uses for English.

    Raises:
        FlowError: if the parameters are missing or changed.
    """
    from nltk.tokenize.punkt import PunktSentenceTokenizer

    check_files(folder)
    splitter: Splitter = PunktSentenceTokenizer(_parameters(folder))
    return splitter


def _parameters(folder: Path) -> Any:
    from nltk.tabdata import PunktDecoder
    from nltk.tokenize.punkt import PunktParameters

    decoder, parameters = PunktDecoder(), PunktParameters()
    with (folder / "collocations.tab").open(encoding="utf-8") as stream:
        parameters.collocations = set(decoder.tab2tups(stream))
    with (folder / "sent_starters.txt").open(encoding="utf-8") as stream:
        parameters.sent_starters = decoder.txt2set(stream)
    with (folder / "abbrev_types.txt").open(encoding="utf-8") as stream:
        parameters.abbrev_types = decoder.txt2set(stream)
    with (folder / "ortho_context.tab").open(encoding="utf-8") as stream:
        parameters.ortho_context = decoder.tab2intdict(stream)
    return parameters


def describe_sentence_data() -> dict[str, str]:
    """Return which sentence data is used, for a record."""
    return {
        "name": "NLTK punkt_tab, English",
        "from": RESOURCE,
        "sha256": sha256_text(canonical_json(FILES)),
    }
