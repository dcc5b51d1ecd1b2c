"""KeyDiff: keep the tokens whose keys differ most from the average key (arXiv 2504.15364)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from kvfold.methods.base import LayerView
from kvfold.methods.baselines.select import Selection, mean_over_group
from kvfold.methods.scores import keys_for_scores


@dataclass(frozen=True, kw_only=True)
class KeyDiff(Selection):
    """Tokens whose key has the smallest cosine similarity to the mean of all keys scaled to length 1.

    Applied once, to the whole prompt (the paper also applies it block by block while reading).

    Parameters
    ----------
    keep, bits_per_element, tokens, bits, group
        As for `Selection`.
    """

    name = "keydiff"
    paper = "KeyDiff, arXiv 2504.15364"

    def scores(self, view: LayerView) -> Tensor:
        keys = keys_for_scores(view).float()
        # A latent cache has one KV head, whose tokens are those of all heads.
        anchor = (normalize(keys, dim=-1) * view.valid[..., None]).sum(2, keepdim=True)
        return -mean_over_group(cosine_similarity(keys, anchor, dim=-1), view)
