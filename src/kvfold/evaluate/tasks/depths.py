"""Where in a document the asked-for thing stands: a grid of depths whose first few samples are spread already."""


def depth_of(index: int, depths: int) -> float:
    """Depth in [0, 1] of a sample, from a grid of `depths` at equal distances; one alone is halfway.

    The grid is walked from the middle to the ends, and then to what is farthest from the depths before.
    """
    if depths == 1:
        return 0.5
    order = list(dict.fromkeys([(depths - 1) // 2, 0, depths - 1]))
    while len(order) <= index % depths:
        left = [place for place in range(depths) if place not in order]
        order.append(max(left, key=lambda place: min(abs(place - taken) for taken in order)))
    return order[index % depths] / (depths - 1)
