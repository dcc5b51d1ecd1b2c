"""Rotations: orthogonal, seeded, spreading."""

import pytest
import torch

from kvfold.codecs.rotation import haar, hadamard

PINNED_HADAMARD = [
    [-0.5, 0.5, 0.5, -0.5],
    [-0.5, -0.5, 0.5, 0.5],
    [-0.5, 0.5, -0.5, 0.5],
    [-0.5, -0.5, -0.5, -0.5],
]
PINNED_HAAR = [[0.577440, 0.816433], [-0.816433, 0.577440]]
PINNED_HAAR_64 = [-0.300884, -0.053512, -0.165864]
DIMS = [1, 2, 3, 4, 8, 10, 64, 80, 96, 112, 128, 192, 256]


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("make", [hadamard, haar])
def test_orthogonal_and_seeded(make, dim):
    matrix = make(dim, 7)
    assert matrix.shape == (dim, dim) and matrix.dtype == torch.float32
    assert torch.allclose(matrix @ matrix.T, torch.eye(dim), atol=1e-5)
    assert torch.equal(matrix, make(dim, 7))
    if dim > 3:
        assert not torch.equal(matrix, make(dim, 8))
    state = torch.random.get_rng_state()
    make(dim, 9)
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("dim", [8, 64, 128])
def test_hadamard_entries(dim):
    assert torch.allclose(hadamard(dim, 0).abs(), torch.full((dim, dim), dim**-0.5))


@pytest.mark.parametrize("dim", [64, 80, 96, 128])
@pytest.mark.parametrize("make", [hadamard, haar])
def test_spreads_a_single_channel_over_all(make, dim):
    # A channel that dominates, the usual reason to rotate, must not dominate afterwards.
    spread = make(dim, 3).abs().amax(0)
    assert spread.max() < 6 * dim**-0.5


def test_haar_is_centred():
    means = torch.stack([haar(4, seed) for seed in range(400)]).mean(0)
    assert means.abs().max() < 0.12


def test_values_are_pinned():
    """A stored artifact names a seed, so a seed must mean the same matrix in every version."""
    assert hadamard(4, 0).tolist() == PINNED_HADAMARD
    assert torch.allclose(haar(2, 0), torch.tensor(PINNED_HAAR), atol=1e-6)
    assert torch.allclose(haar(64, 0)[0, :3], torch.tensor(PINNED_HAAR_64), atol=2e-6)


def test_refused():
    for make in (hadamard, haar):
        with pytest.raises(ValueError, match="at least 1"):
            make(0, 0)
