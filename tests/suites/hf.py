"""Models of the transformers library, one for each family that people train, tiny and with random weights.

Every model is the library's own class in training mode with its own dropout, on a batch as its users have it: texts
with padding and labels, pictures, sound. Where the library computes a loss from labels, that is the loss. Sizes are set
wherever a configuration has them (`SMALL`), two layers deep and narrow, in float64 as far as the library lets it (many
models compute norms and softmax in float32 whatever they are given).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.suites.harness import Case

VOCAB, N, T, PIXELS, CLASSES = 64, 4, 12, 32, 5

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "d_model": 32, "encoder_layers": 2,
    "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "image_size": PIXELS, "patch_size": 8, "num_labels": CLASSES, "n_positions": 64, "ffn_dim": 64, "rotary_dim": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "embedding_size": 16,
    "ffn_hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "type_vocab_size": 2, "word_embed_proj_dim": 32, "max_source_positions": 64,
    "max_target_positions": 64, "sliding_window": 8, "num_channels": 3, "projection_dim": 16, "dim": 32, "n_layers": 2,
    "n_heads": 4, "hidden_dim": 64, "d_inner": 64, "n_layer": 2, "n_head": 4, "sinusoidal_pos_embds": False,
}  # fmt: skip
"""What is made small wherever a configuration has it."""


@dataclass(frozen=True)
class Family:
    """A class of the library, what is special in its configuration, and what its batch is."""

    model: str
    batch: Callable[[Any], dict[str, Any]]
    config: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Configurations inside of the configuration."""
    dtype: torch.dtype = torch.float64
    """Float32 where the library has ops that know nothing wider."""
    change: Callable[[Any], None] = lambda model: None
    """What its users do to a model before they train it."""


def drawn(*shape: int, upto: int = 0) -> Tensor:
    """Integers from 3 (below are padding, begin and end) if there is an upper end, else normal numbers."""
    generator = torch.Generator().manual_seed(sum(shape) + 7)
    if upto:
        return torch.randint(3 if upto > 8 else 0, upto, shape, generator=generator)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def padding() -> Tensor:
    """Of rows of different lengths, one for each words in a text and 0 for padding."""
    return (torch.arange(T)[None] < torch.tensor([T, T - 3, T, T - 5])[:, None]).long()


def causal(config: Any) -> dict[str, Any]:
    """Texts, and the same as labels."""
    ids = drawn(N, T, upto=VOCAB)
    return {"input_ids": ids, "labels": ids.clone()}


def brief(config: Any) -> dict[str, Any]:
    """Texts of a few words, for models that go through them word by word."""
    ids = drawn(N, 4, upto=VOCAB)
    return {"input_ids": ids, "labels": ids.clone()}


def padded(config: Any) -> dict[str, Any]:
    """Texts of different lengths, padded on the right, labels -100 where they are."""
    mask, ids = padding(), drawn(N, T, upto=VOCAB)
    ids = torch.where(mask == 1, ids, 0)
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}


def encoded(config: Any) -> dict[str, Any]:
    """Padded texts and shorter ones to make of them."""
    made = padded(config)
    labels = drawn(N, T - 4, upto=VOCAB)
    labels[1, -2:] = -100
    return {**made, "labels": labels}


def classed(config: Any) -> dict[str, Any]:
    """Padded texts and a class for each."""
    return {**padded(config), "labels": drawn(N, upto=CLASSES)}


def pictures(config: Any) -> dict[str, Any]:
    """Pictures and a class for each."""
    return {"pixel_values": drawn(N, 3, PIXELS, PIXELS), "labels": drawn(N, upto=CLASSES)}


def segments(config: Any) -> dict[str, Any]:
    """Pictures and a class for each pixel."""
    return {"pixel_values": drawn(N, 3, PIXELS, PIXELS), "labels": drawn(N, PIXELS, PIXELS, upto=CLASSES)}


def both(config: Any) -> dict[str, Any]:
    """Pictures and texts that belong together."""
    made = padded(config)
    return {"input_ids": made["input_ids"], "attention_mask": made["attention_mask"], "return_loss": True,
            "pixel_values": drawn(N, 3, PIXELS, PIXELS)}  # fmt: skip


def captions(config: Any) -> dict[str, Any]:
    """Texts in which a picture stands for some of the words."""
    ids = drawn(N, T + 16, upto=VOCAB - 1)
    ids[:, 1:17] = VOCAB - 1
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone(),
            "pixel_values": drawn(N, 3, PIXELS, PIXELS)}  # fmt: skip


def films(config: Any) -> dict[str, Any]:
    """Four pictures each, and a class."""
    return {"pixel_values": drawn(N, 4, 3, PIXELS, PIXELS), "labels": drawn(N, upto=CLASSES)}


def sound(config: Any) -> dict[str, Any]:
    """Sounds and a class for each."""
    return {"input_values": drawn(N, 640), "labels": drawn(N, upto=CLASSES)}


def spoken(config: Any) -> dict[str, Any]:
    """Sounds and the letters in them."""
    return {"input_values": drawn(N, 1280), "labels": drawn(N, 3, upto=VOCAB)}


def spectra(config: Any) -> dict[str, Any]:
    """Spectra of sounds and the texts in them."""
    return {"input_features": drawn(N, 16, 64), "labels": drawn(N, 6, upto=VOCAB)}


def frames(config: Any) -> dict[str, Any]:
    """Spectra of sounds, time first, and the texts in them."""
    return {"input_features": drawn(N, 32, 16), "labels": drawn(N, 6, upto=VOCAB)}


def pages(config: Any) -> dict[str, Any]:
    """Texts with the places of their words on a page."""
    corner = drawn(N, T, 2, upto=30)
    return {**padded(config), "bbox": torch.cat([corner, corner + 5], -1)}


def boxes(config: Any) -> dict[str, Any]:
    """Pictures, for which no matching of boxes is computed: the loss is of what comes out."""
    return {"pixel_values": drawn(N, 3, PIXELS, PIXELS)}


def series(config: Any) -> dict[str, Any]:
    """Numbers over time."""
    return {"past_values": drawn(N, 16, 2), "future_values": drawn(N, 4, 2)}


class LowRank(nn.Module):
    """A linear layer that stays as it is, and a product of two narrow ones beside it that is trained."""

    def __init__(self, base: nn.Linear, rank: int = 4, alpha: float = 8.0, dropout: float = 0.1) -> None:
        super().__init__()
        self.base, self.scaling, self.dropout = base, alpha / rank, nn.Dropout(dropout)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(self.dropout(x))) * self.scaling
        return out


def adapted(model: nn.Module) -> None:
    """Freeze all of it, and put adapters beside the projections of attention."""
    model.requires_grad_(False)
    places = [(m, n, c) for m in model.modules() for n, c in m.named_children() if n in ("q_proj", "v_proj", "query")]
    for module, name, child in places:
        assert isinstance(child, nn.Linear)
        setattr(module, name, LowRank(child))


CONVS = {"layerdrop": 0.0, "mask_time_prob": 0.0, "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8),
         "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
         "num_codevectors_per_group": 4, "codevector_dim": 16, "proj_codevector_dim": 16,
         "classifier_proj_size": 16}  # fmt: skip
STILL = {"dropout": 0.0, "attention_dropout": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
"""Without dropout: parts that look at data run as they are (`laminar.eager`), and draw numbers of their own."""
STAGES = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "patch_size": 4}
NETS = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}
TWO: dict[str, dict[str, Any]] = {"text_config": {"num_labels": 2}, "vision_config": {}}

FAMILIES: dict[str, Family] = {
    "Llama": Family("LlamaForCausalLM", causal),
    "Llama (recomputed)": Family("LlamaForCausalLM", causal, change=lambda m: m.gradient_checkpointing_enable()),
    "Llama (LoRA)": Family("LlamaForCausalLM", padded, change=adapted),
    "Qwen2": Family("Qwen2ForCausalLM", padded),
    "Qwen3": Family("Qwen3ForCausalLM", causal),
    "Mistral": Family("MistralForCausalLM", causal),
    "Mixtral": Family("MixtralForCausalLM", causal, dtype=torch.float32),
    "Qwen3-MoE": Family("Qwen3MoeForCausalLM", causal, dtype=torch.float32),
    "GPT-OSS": Family("GptOssForCausalLM", causal, dtype=torch.float32),
    "OLMoE": Family("OlmoeForCausalLM", causal, dtype=torch.float32),
    "DeepSeek-V3": Family("DeepseekV3ForCausalLM", causal, {"q_lora_rank": 8, "kv_lora_rank": 8, "n_routed_experts": 4,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1, "num_key_value_heads": 4}, dtype=torch.float32),
    "Gemma": Family("GemmaForCausalLM", causal),
    "Gemma 2": Family("Gemma2ForCausalLM", padded),
    "Gemma 3": Family("Gemma3ForCausalLM", causal),
    "Phi": Family("PhiForCausalLM", causal),
    "Phi-3": Family("Phi3ForCausalLM", causal),
    "Granite": Family("GraniteForCausalLM", causal),
    "OLMo": Family("OlmoForCausalLM", causal),
    "OLMo 2": Family("Olmo2ForCausalLM", causal),
    "Cohere": Family("CohereForCausalLM", causal),
    "StableLM": Family("StableLmForCausalLM", causal),
    "StarCoder2": Family("Starcoder2ForCausalLM", causal),
    "GPT-BigCode": Family("GPTBigCodeForCausalLM", causal),
    "Persimmon": Family("PersimmonForCausalLM", causal),
    "SmolLM3": Family("SmolLM3ForCausalLM", causal),
    "Nemotron": Family("NemotronForCausalLM", causal),
    "GLM-4": Family("Glm4ForCausalLM", causal),
    "GPT-2": Family("GPT2LMHeadModel", padded),
    "GPT-Neo": Family("GPTNeoForCausalLM", causal, {"attention_types": [[["global", "local"], 1]], "window_size": 4}),
    "GPT-NeoX": Family("GPTNeoXForCausalLM", causal),
    "GPT-J": Family("GPTJForCausalLM", causal),
    "CodeGen": Family("CodeGenForCausalLM", causal),
    "OPT": Family("OPTForCausalLM", padded),
    "BLOOM": Family("BloomForCausalLM", padded),
    "Falcon": Family("FalconForCausalLM", causal),
    "MPT": Family("MptForCausalLM", causal),
    "XGLM": Family("XGLMForCausalLM", causal, {"attention_heads": 4}, dtype=torch.float32),
    "Mamba": Family("MambaForCausalLM", brief),
    "Mamba 2": Family("Mamba2ForCausalLM", causal, {"num_heads": 8, "head_dim": 8, "state_size": 8, "chunk_size": 4,
        "n_groups": 2}),
    "RWKV": Family("RwkvForCausalLM", brief),
    "RecurrentGemma": Family("RecurrentGemmaForCausalLM", causal, {"num_hidden_layers": 3, "lru_width": 32,
        "attention_window_size": 8}),
    "BART": Family("BartForConditionalGeneration", encoded),
    "mBART": Family("MBartForConditionalGeneration", encoded),
    "Pegasus": Family("PegasusForConditionalGeneration", encoded),
    "Marian": Family("MarianMTModel", encoded),
    "M2M-100": Family("M2M100ForConditionalGeneration", encoded, {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}),
    "Blenderbot": Family("BlenderbotForConditionalGeneration", encoded),
    "T5": Family("T5ForConditionalGeneration", encoded, {"decoder_start_token_id": 0}),
    "mT5": Family("MT5ForConditionalGeneration", encoded, {"decoder_start_token_id": 0}),
    "LED": Family("LEDForConditionalGeneration",
        lambda config: {**encoded(config), "attention_mask": torch.ones(N, T, dtype=torch.long)},
        {**STILL, "attention_window": 4, "max_encoder_position_embeddings": 64,
        "max_decoder_position_embeddings": 64}),
    "BERT": Family("BertForMaskedLM", padded),
    "BERT (LoRA)": Family("BertForSequenceClassification", classed, change=adapted),
    "RoBERTa": Family("RobertaForMaskedLM", padded),
    "XLM-RoBERTa": Family("XLMRobertaForSequenceClassification", classed),
    "DistilBERT": Family("DistilBertForSequenceClassification", classed),
    "ALBERT": Family("AlbertForMaskedLM", padded),
    "ELECTRA": Family("ElectraForMaskedLM", padded),
    "DeBERTa": Family("DebertaForMaskedLM", padded, {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "DeBERTa-v2": Family("DebertaV2ForMaskedLM", padded,
        {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}),
    "ModernBERT": Family("ModernBertForMaskedLM", padded, {"local_attention": 8}),
    "XLNet": Family("XLNetLMHeadModel", causal),
    "Longformer": Family("LongformerForMaskedLM", causal, {**STILL, "attention_window": 4}),
    "BigBird": Family("BigBirdForMaskedLM", padded, {"attention_type": "original_full"}),
    "MPNet": Family("MPNetForMaskedLM", padded),
    "FNet": Family("FNetForMaskedLM", causal),
    "ConvBERT": Family("ConvBertForMaskedLM", padded),
    "Funnel": Family("FunnelForMaskedLM", padded, {"block_sizes": [1, 1], "d_head": 8}),
    "ESM": Family("EsmForMaskedLM", padded, {"position_embedding_type": "rotary", "mask_token_id": 3}),
    "LayoutLM": Family("LayoutLMForMaskedLM", pages),
    "LayoutLMv3": Family("LayoutLMv3ForTokenClassification",
        lambda config: {**pages(config), "labels": drawn(N, T, upto=CLASSES),
                        "pixel_values": drawn(N, 3, PIXELS, PIXELS)},
        {"coordinate_size": 6, "shape_size": 4, "input_size": PIXELS}),
    "ViT": Family("ViTForImageClassification", pictures),
    "DeiT": Family("DeiTForImageClassification", pictures),
    "BEiT": Family("BeitForImageClassification", pictures),
    "DINOv2": Family("Dinov2ForImageClassification", pictures),
    "Swin": Family("SwinForImageClassification", pictures, STAGES),
    "Swin v2": Family("Swinv2ForImageClassification", pictures, STAGES),
    "ConvNeXt": Family("ConvNextForImageClassification", pictures, {**NETS, "patch_size": 4}),
    "ConvNeXt v2": Family("ConvNextV2ForImageClassification", pictures, {**NETS, "patch_size": 4}),
    "ResNet": Family("ResNetForImageClassification", pictures, {**NETS, "embedding_size": 8}),
    "RegNet": Family("RegNetForImageClassification", pictures, {**NETS, "embedding_size": 8, "groups_width": 4}),
    "EfficientNet": Family("EfficientNetForImageClassification", pictures, {"hidden_dim": 640, "depth_coefficient": 0.5,
        "width_coefficient": 0.5}),
    "MobileNetV2": Family("MobileNetV2ForImageClassification", pictures),
    "SegFormer": Family("SegformerForSemanticSegmentation", segments, {"num_encoder_blocks": 2, "depths": [1, 1],
        "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [7, 3], "strides": [4, 2],
        "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16}),
    "MobileViT": Family("MobileViTForImageClassification", pictures, {"hidden_sizes": [16, 24, 32],
        "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32], "num_attention_heads": 2, "patch_size": 2, "image_size": 64}),
    "PVT": Family("PvtForImageClassification", pictures, {"num_encoder_blocks": 2, "depths": [1, 1],
        "sequence_reduction_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [4, 2], "strides": [4, 2],
        "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}),
    "ViT-MAE": Family("ViTMAEForPreTraining", boxes, {"decoder_num_attention_heads": 4, "decoder_hidden_size": 16,
        "decoder_num_hidden_layers": 1, "decoder_intermediate_size": 32}),
    "DPT": Family("DPTForSemanticSegmentation", segments, {"neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 8,
        "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "readout_type": "ignore", "is_hybrid": False}),
    "CLIP": Family("CLIPModel", both, parts=TWO),
    "SigLIP": Family("SiglipModel", both, parts=TWO),
    "BLIP": Family("BlipForConditionalGeneration",
        lambda config: {k: v for k, v in {**both(config), **padded(config)}.items() if k != "return_loss"},
        parts={**TWO, "text_config": {"encoder_hidden_size": 32, "bos_token_id": 1, "sep_token_id": 2}}),
    "LLaVA": Family("LlavaForConditionalGeneration", captions, {"image_token_index": VOCAB - 1,
        "vision_feature_select_strategy": "full", "vision_feature_layer": -1},
        parts={"text_config": {"model_type": "llama"}, "vision_config": {"model_type": "siglip_vision_model"}}),
    "PaliGemma": Family("PaliGemmaForConditionalGeneration",
        lambda config: {**captions(config), "token_type_ids": torch.ones(N, T + 16, dtype=torch.long)},
        {"image_token_index": VOCAB - 1, "projection_dim": 32},
        parts={"text_config": {"model_type": "gemma"}, "vision_config": {"model_type": "siglip_vision_model",
            "projection_dim": 32}}),
    "ViLT": Family("ViltForImageAndTextRetrieval",
        lambda config: {k: v for k, v in both(config).items() if k != "return_loss"}, {"max_image_length": -1}),
    "Whisper": Family("WhisperForConditionalGeneration", spectra, {"num_mel_bins": 16, "max_source_positions": 32}),
    "Speech2Text": Family("Speech2TextForConditionalGeneration", frames, {"input_feat_per_channel": 16,
        "conv_channels": 16}),
    "Wav2Vec2": Family("Wav2Vec2ForCTC", spoken, CONVS),
    "HuBERT": Family("HubertForSequenceClassification", sound, CONVS),
    "WavLM": Family("WavLMForSequenceClassification", sound, CONVS),
    "AST": Family("ASTForAudioClassification",
        lambda config: {"input_values": drawn(N, 32, 16), "labels": drawn(N, upto=CLASSES)},
        {"max_length": 32, "num_mel_bins": 16, "frequency_stride": 8, "time_stride": 8}),
    "DETR": Family("DetrForObjectDetection", boxes, {**STILL, "num_queries": 6, "use_timm_backbone": False,
        "backbone_config": {"model_type": "resnet", **NETS, "embedding_size": 8, "out_features": ["stage2"]}}),
    "YOLOS": Family("YolosForObjectDetection", boxes, {"image_size": [PIXELS, PIXELS], "num_detection_tokens": 4}),
    "VideoMAE": Family("VideoMAEForVideoClassification", films, {"num_frames": 4, "tubelet_size": 2}),
    "TimeSformer": Family("TimesformerForVideoClassification", films, {"num_frames": 4}),
    "ViViT": Family("VivitForVideoClassification", films, {"num_frames": 4, "tubelet_size": [2, 8, 8]}),
    "PatchTST": Family("PatchTSTForPrediction", series, {"num_input_channels": 2, "context_length": 16,
        "patch_length": 4, "patch_stride": 4, "prediction_length": 4}),
    "Decision Transformer": Family("DecisionTransformerModel",
        lambda config: {"states": drawn(N, 6, 3), "actions": drawn(N, 6, 2), "rewards": drawn(N, 6, 1),
                        "returns_to_go": drawn(N, 6, 1), "timesteps": torch.arange(6).repeat(N, 1),
                        "attention_mask": torch.ones(N, 6)}, {"state_dim": 3, "act_dim": 2}),
}  # fmt: skip
"""By the name people call them."""


def small(cls: Any, more: dict[str, Any]) -> dict[str, Any]:
    """Arguments that make a configuration small."""
    known, called = cls(), cls.attribute_map  # some have two names for a thing
    said = {called.get(k, k) for k in more}
    usual = {k: v for k, v in SMALL.items() if called.get(k, k) not in said}
    return {**{k: v for k, v in usual.items() if hasattr(known, k) and _may_be_set(cls, k)}, **more}


def _may_be_set(cls: Any, name: str) -> bool:
    """Some configurations compute what others are told, or refuse to be told."""
    found = getattr(cls, name, None)
    return not isinstance(found, property) or (
        found.fset is not None and "raise NotImplementedError" not in inspect.getsource(found.fset)
    )


def configured(family: Family) -> Any:
    """The configuration of a family."""
    cls = getattr(transformers, family.model).config_class
    whole = dict(family.config)
    for name, more in family.parts.items():
        kind = more.get("model_type") or getattr(cls(), name).model_type
        part = type(transformers.AutoConfig.for_model(kind)) if kind in transformers.CONFIG_MAPPING else None
        part = part or type(getattr(cls(), name))
        whole[name] = {**small(part, more), "model_type": kind}
    return cls(**small(cls, whole))


def made(name: str) -> nn.Module:
    """The model with the weights it always gets."""
    torch.manual_seed(0)
    family = FAMILIES[name]
    model = getattr(transformers, family.model)(configured(family))
    family.change(model)
    model = model.to(family.dtype).train()
    for p in model.parameters():  # what begins as zero (ConvNeXt's scales, LoRA's) would hide what lies behind it
        if p.requires_grad and not p.detach().any():
            nn.init.normal_(p, std=0.1)
    return model  # type: ignore[no-any-return]


def own_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """The model's own loss, or one in which every element of its first output counts differently."""
    out = model(**batch)
    loss = getattr(out, "loss", None)
    if loss is not None:
        return loss  # type: ignore[no-any-return]
    found: Tensor = next(v for v in out.to_tuple() if isinstance(v, Tensor) and v.is_floating_point())
    weight = torch.linspace(0.5, 1.5, found.numel(), dtype=found.dtype).view(found.shape)
    return (found * weight).pow(2).mean() + found.mean()


def find(name: str) -> Case:
    """A family as a case of the harness."""
    family = FAMILIES[name]
    batch = {
        k: v.to(family.dtype) if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in family.batch(None).items()
    }
    return Case(functools.partial(made, name), own_loss, batch, family.dtype)
