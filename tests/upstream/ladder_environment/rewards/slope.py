from ladder_data import ladders

MOST = len(ladders())


def steepness(said):
    """The share of neighbours that rise."""
    pairs = list(zip(said, said[1:]))[:MOST]
    return sum(a < b for a, b in pairs) / len(pairs) if pairs else 0.0
