"""Rank 0 of 3: stage 0 of 3, replica 0 of 1, LlavaForConditionalGeneration.

Holds     model.vision_tower.embeddings: frozen
          model.vision_tower.pre_layrnorm: frozen
          model.vision_tower.encoder.layers.0 ... model.vision_tower.encoder.layers.1 (2 layers): frozen
          model.multi_modal_projector: trained
          model.language_model.embed_tokens: frozen
          model.merge: no parameters
          model.language_model.layers.0: frozen
Receives  gradient of model.language_model.layers.0 f32[2, 20, 48] from stage 1
Sends     model.language_model.layers.0 f32[2, 20, 48] to stage 1
Order     F 0 0 | SEND F 0>1 0 | F 0 1 | SEND F 0>1 1 | RECV B 1>0 0 | BW 0 0 | RECV B 1>0 1 | BW 0
          1 | REDUCE
"""

from csc.runtime.weight_names import under

from . import layers

STAGES = (0,)
LAYERS_0_TO_1 = [f"model.vision_tower.encoder.layers.{i}." for i in range(0, 2)]


def forward(batch, received, weights, constants):
    """F of stage 0."""
    pixel_values = batch["pixel_values"]
    position_ids = constants["model.vision_tower.embeddings.position_ids"]
    input_ids = batch["input_ids"]
    (mask, cos, sin, visibility) = layers.tables.of_stage_0(batch, constants)
    embeddings = layers.clip_vision_embeddings_forward_only.forward(
        pixel_values, position_ids, under(weights, "model.vision_tower.embeddings."),
    )
    pre_layrnorm = layers.pre_layrnorm_forward_only.forward(
        embeddings, under(weights, "model.vision_tower.pre_layrnorm."),
    )
    hidden_states = pre_layrnorm
    for layer in LAYERS_0_TO_1:
        hidden_states = layers.clip_encoder_layer_forward_only.forward(hidden_states, under(weights, layer))
    layers_1 = hidden_states
    multi_modal_projector, *saved_multi_modal_projector = layers.llava_multi_modal_projector_first.forward(
        layers_1, under(weights, "model.multi_modal_projector."),
    )
    embed_tokens = layers.embed_tokens_forward_only.forward(
        input_ids, under(weights, "model.language_model.embed_tokens."),
    )
    merge, *saved_merge = layers.merge.forward(multi_modal_projector, embed_tokens, mask)
    layers_0, *saved_layers_0 = layers.llama_decoder_layer_frozen.forward(
        merge, cos, sin, visibility, under(weights, "model.language_model.layers.0."),
    )
    sent = {"model.language_model.layers.0": layers_0}
    saved = (mask, cos, sin, visibility, saved_multi_modal_projector, saved_merge, saved_layers_0)
    return sent, saved


def backward_input(saved, received, weights, constants):
    """B of stage 0."""
    (mask, cos, sin, visibility, saved_multi_modal_projector, saved_merge, saved_layers_0) = saved; del saved
    d_layers_0 = received["model.language_model.layers.0"]                                # f32[2, 20, 48] from stage 1
    d_merge = layers.llama_decoder_layer_frozen.backward_input(
        saved_layers_0.pop(), cos, sin, visibility, under(weights, "model.language_model.layers.0."),
        d_layers_0,
    )
    d_multi_modal_projector = layers.merge.backward_input(saved_merge.pop(), mask, d_merge)
    stashed_multi_modal_projector = [layers.llava_multi_modal_projector_first.backward_input(
        saved_multi_modal_projector.pop(), d_multi_modal_projector,
    )]
    sent = {}
    stashed = (stashed_multi_modal_projector,)
    return sent, stashed


def backward_weight(stashed, weights, constants):
    """W of stage 0: (parameter name, gradient) pairs, last region first."""
    (stashed_multi_modal_projector,) = stashed; del stashed
    w = under(weights, "model.multi_modal_projector.")
    yield from w.full_names(layers.llava_multi_modal_projector_first.backward_weight(
        stashed_multi_modal_projector.pop(), w,
    ))


def backward(saved, received, weights, constants):
    """BW of stage 0: B and W, region by region; returns what is sent."""
    (mask, cos, sin, visibility, saved_multi_modal_projector, saved_merge, saved_layers_0) = saved; del saved
    d_layers_0 = received["model.language_model.layers.0"]                                # f32[2, 20, 48] from stage 1
    d_merge = layers.llama_decoder_layer_frozen.backward_input(
        saved_layers_0.pop(), cos, sin, visibility, under(weights, "model.language_model.layers.0."),
        d_layers_0,
    )
    d_multi_modal_projector = layers.merge.backward_input(saved_merge.pop(), mask, d_merge)
    stashed = [layers.llava_multi_modal_projector_first.backward_input(
        saved_multi_modal_projector.pop(), d_multi_modal_projector,
    )]
    w = under(weights, "model.multi_modal_projector.")
    yield from w.full_names(layers.llava_multi_modal_projector_first.backward_weight(stashed.pop(), w))
    sent = {}
    return sent
