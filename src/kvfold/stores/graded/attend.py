"""Attention over one row of graded tokens: by the C loop for few queries on a CPU, else by plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.kernels import graded_cpu
from kvfold.kernels.position_bias import position_logits, turns
from kvfold.kernels.reference import Part, soft_cap, softmax_lse
from kvfold.stores.base import AttendContext, Rotary
from kvfold.stores.graded.frame import Frame, GradedLayout, magnitudes, require, value_rotation
from kvfold.stores.graded.sections import Row


class RowAttention:
    """Attention over one row.

    Parameters
    ----------
    layout : GradedLayout
    frame : Frame
        Of all rows.
    row : int
    part : Row
    counts : (kv_heads, grades + 2) int32
    """

    def __init__(self, layout: GradedLayout, frame: Frame, row: int, part: Row, counts: Tensor):
        self.layout, self.frame, self.part, self.counts = layout, frame.select(row), part, counts
        self.shift = layout.shifts[row]
        self._loop: graded_cpu.RowLoop | None = None

    def attend(self, query: Tensor, visible: int, context: AttendContext) -> Part:
        """Attention of query (heads, n, key_dim) over the tokens before position `visible`."""
        found = self.in_one(query, visible, context)
        if found is not None:
            return found
        heads, count, dim = query.shape
        q = query.float().reshape(len(self.frame.order), -1, dim) * context.scaling
        limit = max(1, (1 << 24) // max(self.layout.tokens, 1))
        parts = [
            self._some(q[:, start : start + limit], visible, context) for start in range(0, q.shape[1], limit)
        ]
        output, lse = (torch.cat(part, 1) for part in zip(*parts, strict=True))
        return output.view(heads, count, -1), lse.view(heads, count)

    def in_one(
        self,
        query: Tensor,
        visible: int,
        context: AttendContext,
        tail: tuple[Tensor, Tensor] | None = None,
        before: Part | None = None,
    ) -> Part | None:
        """As `attend`, with a tail and what came before, by the C loop where it serves; see `graded_cpu.RowLoop`."""
        if query.device.type != "cpu" or graded_cpu.problem():
            return None
        layout, frame, around = self.layout, self.frame, None
        if self._loop is None:
            rotation = value_rotation(layout.value_dim, query.device)
            self._loop = graded_cpu.RowLoop(
                layout.widths, self.counts, frame.tensors(), self.part.buffers, rotation
            )
        if frame.key_turned is not None:
            rotary = require(context.rotary)
            around = turns(rotary, layout.key_dim, layout.tokens, self.shift, query.device)
        return self._loop.attend(query, around, visible, context.scaling, context.softcap, tail, before)

    def _some(self, q: Tensor, visible_tokens: int, context: AttendContext) -> Part:
        """By plain torch, for scaled queries grouped by KV head (kv_heads, n, key_dim)."""
        frame, part = self.frame, self.part
        scores = self._scores(q, context.rotary)
        weights, lses, coded = [], [], []
        for head, logits in zip(part.heads, scores, strict=True):
            logits = soft_cap(logits, context.softcap)
            visible = head.tokens
            if visible_tokens < self.layout.tokens:
                hidden = part.buffers["positions"][head.first : head.first + head.tokens] >= visible_tokens
                visible -= int(hidden.sum())
                logits = logits.masked_fill(hidden, -torch.inf)
            if visible:
                weight, lse = softmax_lse(logits)
            else:
                weight, lse = torch.zeros_like(logits), logits.new_full((len(logits),), -torch.inf)
            weights.append(weight)
            lses.append(lse)
            coded.append(weight[:, : head.coded].sum(1, keepdim=True))
        output = self._mixed(weights) * frame.value_magnitude[:, None, None]
        output = output @ value_rotation(self.layout.value_dim, q.device)
        output += torch.stack(coded) * frame.value_mean[:, None].float()
        output += self._plain(weights)
        return output, torch.stack(lses)

    def _scores(self, q: Tensor, rotary: Rotary | None) -> list[Tensor]:
        """Logits (n, kept) of each head."""
        frame, part = self.frame, self.part
        constant = q @ frame.key_mean.float()[..., None]
        turned = self._turned(q, rotary)
        if turned is not None:
            turned += constant
        positions = part.buffers["positions"].int()
        fine_keys, exact_keys = part.buffers["fine_keys"].float(), part.buffers["exact_keys"].float()
        scale, minimum = part.buffers["fine_scales"][:, :2].float().t()
        scores = []
        for index, head in enumerate(part.heads):
            logits = q.new_empty(q.shape[1], head.tokens)
            if turned is None:
                logits[:, : head.coded] = constant[index]
            else:
                where = positions[head.first : head.first + head.coded]
                logits[:, : head.coded] = turned[index].index_select(1, where)
            own = logits[:, head.coded :]
            if head.fine.stop > head.fine.start:
                fine = own[:, : head.fine.stop - head.fine.start]
                torch.mul(q[index] @ fine_keys[head.fine].t(), scale[head.fine], out=fine)
                fine += q[index].sum(1, keepdim=True) * minimum[head.fine]
            if head.exact.stop > head.exact.start:
                own[:, head.fine.stop - head.fine.start :] = q[index] @ exact_keys[head.exact].t()
            scores.append(logits)
        order = frame.order.long()[:, None].expand(-1, q.shape[1], -1)
        scaled = (q * frame.key_deviation[:, None].float()).gather(2, order).unbind()
        for block in part.keys:
            for section, z in block.decode():
                channels = scaled[section.head].narrow(1, section.column, section.channels)
                scores[section.head].narrow(1, section.start, len(z)).addmm_(channels, z.t())
        return scores

    def _turned(self, q: Tensor, rotary: Rotary | None) -> Tensor | None:
        """Logits (kv_heads, n, tokens) of the turned vector at every position."""
        if self.frame.key_turned is None:
            return None
        vector = self.frame.key_turned.float()
        return position_logits(q, vector, require(rotary), self.layout.tokens, self.shift)

    def _mixed(self, weights: list[Tensor]) -> Tensor:
        """Coded values mixed by weights (n, kept) of each head, still rotated, in units of the magnitude.

        The weights of coded tokens are multiplied by their magnitudes in place.
        """
        part, sizes = self.part, magnitudes(self.part.buffers["magnitudes"])
        output = weights[0].new_zeros(len(weights), len(weights[0]), self.layout.value_dim)
        mixed = output.unbind()
        start = 0
        for head, weight in zip(part.heads, weights, strict=True):
            weight[:, : head.coded] *= sizes[start : start + head.coded]
            start += head.coded
        for block in part.values:
            for section, w in block.decode():
                mixed[section.head].addmm_(weights[section.head].narrow(1, section.start, len(w)), w)
        return output

    def _plain(self, weights: list[Tensor]) -> Tensor:
        """Fine and exact values mixed by weights (n, kept) of each head."""
        part = self.part
        fine_values, exact_values = part.buffers["fine_values"].float(), part.buffers["exact_values"].float()
        scale, minimum = part.buffers["fine_scales"][:, 2:].float().t()
        output = weights[0].new_zeros(len(weights), len(weights[0]), self.layout.value_dim)
        for mixed, head, weight in zip(output, part.heads, weights, strict=True):
            fine = weight[:, head.coded : head.tokens - (head.exact.stop - head.exact.start)]
            if fine.shape[1]:
                mixed.addmm_(fine * scale[head.fine], fine_values[head.fine])
                mixed += (fine @ minimum[head.fine])[:, None]
            if head.exact.stop > head.exact.start:
                mixed.addmm_(weight[:, head.coded + fine.shape[1] :], exact_values[head.exact])
        return output
