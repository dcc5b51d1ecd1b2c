"""Tiny random models of many architectures, built in code."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 128

BASE: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=2,
    eos_token_id=1,
)

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": dict(sliding_window=None),
    "phi3": dict(resid_pdrop=0.0, embd_pdrop=0.0),
    "gemma3_text": dict(
        sliding_window=8, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "olmo2": {},
    "granite": {},
    "glm4": dict(partial_rotary_factor=0.5),
    "cohere2": dict(sliding_window=8, layer_types=["sliding_attention", "full_attention", "full_attention"]),
    "qwen3_moe": dict(moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2),
    "smollm3": dict(no_rope_layers=[1, 0, 1], layer_types=["full_attention"] * 3),
    "deepseek_v3": dict(
        num_key_value_heads=4,
        head_dim=8,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
}


@cache
def tiny_model(name: str, implementation: str = "sdpa", dtype: torch.dtype = torch.float32, **options: Any):
    """A random model of the architecture; the same object each time, so tests must not change it."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name](**{**BASE, **ARCHITECTURES.get(name, {}), **options})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=dtype).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    # Random weights attend almost evenly; larger projections give attention something to choose.
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "norm" in key:
                weight.add_(torch.randn_like(weight) * 0.2)
            elif weight.dim() == 1:
                weight.copy_(torch.randn_like(weight))
            elif any(part in key for part in ("q_proj", "k_proj", "qkv", "kv_a", "kv_b", "q_a", "q_b")):
                weight.mul_(4)
    return model


def prompt(tokens: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Random token ids without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch, tokens), generator=generator)


def left_pad(ids: torch.Tensor, pads: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Overwrite the first tokens of each row by padding; returns ids and mask."""
    ids, mask = ids.clone(), torch.ones_like(ids)
    for row, count in enumerate(pads):
        ids[row, :count] = 0
        mask[row, :count] = 0
    return ids, mask


IMAGE = 120
"""Placeholder of an image token in the models of `tiny_vlm`; 121 is a video's."""


@cache
def tiny_vlm(name: str):
    """A random vision-language model; the same object each time, so tests must not change it."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    vision = dict(
        depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64, patch_size=4
    )
    own = {
        "qwen2_5_vl": dict(window_size=16, fullatt_block_indexes=[0]),
        "qwen3_vl": dict(num_position_embeddings=64, deepstack_visual_indexes=[0]),
    }
    config = CONFIG_MAPPING[name](
        text_config={**BASE, "rope_parameters": rope},
        vision_config={**vision, **own[name]},
        image_token_id=IMAGE, video_token_id=121, vision_start_token_id=122, vision_end_token_id=123,
    )  # fmt: skip
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "q_proj" in key or "k_proj" in key:
                weight.mul_(4)
    return model


def pictures(texts: tuple[int, ...] = (30, 20, 6), seed: int = 0) -> dict[str, torch.Tensor]:
    """What a processor would make of one row: text, an image of 16 tokens, text, one of 8 tokens, text."""
    generator = torch.Generator().manual_seed(seed)
    first, *others = (torch.randint(3, 120, (count,), generator=generator) for count in texts)
    parts, grid = [first], torch.tensor([[1, 8, 8], [1, 4, 8]])
    for count, text in zip((16, 8), others, strict=True):
        parts += [torch.tensor([122] + [IMAGE] * count + [123]), text]
    ids = torch.cat(parts)[None]
    pixels = torch.randn(int(grid.prod(1).sum()), 3 * 2 * 4 * 4, generator=generator)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": pixels,
        "image_grid_thw": grid,
        "mm_token_type_ids": (ids == IMAGE).int(),
    }
