"""ROUGE for ``evaluate.load``: rouge-score per sample, from this file instead of the hub.

``evaluate`` copies this file and reads its import lines as text, so: one module a line.
"""

import functools

import datasets
import evaluate
from nltk.stem import porter
from rouge_score import rouge_scorer, tokenize, tokenizers

TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")

_DESCRIPTION = "ROUGE-1, ROUGE-2, ROUGE-L and ROUGE-Lsum F-measures of each sample."
_CITATION = "Lin, C.-Y. (2004). ROUGE: A package for automatic evaluation of summaries."
_INPUTS = (
    "predictions and references: texts whose sentences are separated by newlines; "
    "use_stemmer: Porter stemmer on words of more than three letters."
)


class StemmingTokenizer(tokenizers.Tokenizer):
    """rouge-score's own tokenizer with stemmer, which stems each word only once.

    Stemming is half of the work, and the words are always the same few thousand.
    """

    def __init__(self) -> None:
        self.stem = functools.lru_cache(1 << 18)(porter.PorterStemmer().stem)

    def tokenize(self, text: str) -> list[str]:
        """Return the stemmed words of a text."""
        words: list[str] = tokenize.tokenize(text, self)
        return words


_tokenizer = StemmingTokenizer()


class Rouge(evaluate.Metric):
    """Each score is a list with one F-measure (0 to 1) per sample, in order."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
        )

    def _compute(
        self, predictions: list[str], references: list[str], use_stemmer: bool = True
    ) -> dict[str, list[float]]:
        tokenizer = _tokenizer if use_stemmer else None
        scorer = rouge_scorer.RougeScorer(list(TYPES), tokenizer=tokenizer)
        scores = [
            scorer.score(target, prediction)
            for prediction, target in zip(predictions, references, strict=True)
        ]
        return {name: [float(score[name].fmeasure) for score in scores] for name in TYPES}
