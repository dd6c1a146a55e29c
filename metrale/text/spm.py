"""SentencePiece's merge rule as byte-pair merges.

SentencePiece (BPE type) and llama.cpp join the neighbours whose joined text is the best-scored piece, leftmost first on
equal scores. `tokenizers` joins neighbours by the rank of a listed pair. The list is therefore every pair of pieces whose
joined text is a piece, ranked by that piece's score.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def merges_from_scores(
    pieces: Sequence[str], scores: Sequence[float], ids: Mapping[str, int], mergeable: Iterable[int]
) -> list[tuple[str, str]]:
    """Return the pairs in merge order.

    Within one piece the pair with the shortest left part comes last: two overlapping pairs of the same piece exist only in
    runs of one unit ("aa"+"a" and "a"+"aa"), where the leftmost pair starts with the longer, already merged, left part.

    pieces, scores: by id; ids: id of each piece; mergeable: ids that text may merge into (no control or byte tokens).
    """
    order = sorted((i for i in mergeable if len(pieces[i]) > 1), key=lambda i: (-scores[i], i))
    pairs: list[tuple[str, str]] = []
    append = pairs.append
    for token in order:
        piece = pieces[token]
        for cut in range(len(piece) - 1, 0, -1):
            left = piece[:cut]
            if left in ids:
                right = piece[cut:]
                if right in ids:
                    append((left, right))
    return pairs
