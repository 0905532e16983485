"""Qwen3-MoE: Qwen3's attention; a mixture of experts instead of the MLP in all or some layers."""

from .family import Family, MoEConfig, RawConfig, Windows, windows_by_layer


def windows(raw: RawConfig, num_layers: int) -> Windows:
    """Unlike Qwen2 and Qwen3, this family ignores `max_window_layers`: all layers slide or none does."""
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None
    return windows_by_layer(raw, window, [True] * num_layers)


def moe(raw: RawConfig, num_layers: int) -> MoEConfig | None:
    experts = raw.get("num_experts", raw.get("num_local_experts"))
    if experts is None:
        raise ValueError("a qwen3_moe config needs num_experts")
    if experts == 0:
        return None
    top_k, width = raw.get("num_experts_per_tok", 8), raw.get("moe_intermediate_size", 768)
    if not 1 <= top_k <= experts:
        raise ValueError(f"num_experts_per_tok {top_k} must be between 1 and num_experts {experts}")
    step = raw.get("decoder_sparse_step") or 1
    dense = set(raw.get("mlp_only_layers") or ())
    sparse = tuple(index not in dense and (index + 1) % step == 0 for index in range(num_layers))
    return MoEConfig(experts, top_k, width, normalise=bool(raw.get("norm_topk_prob", False)), sparse=sparse)


FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", qk_norm=True, windows=windows, moe=moe)
