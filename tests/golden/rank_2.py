"""Rank 2 of 3: stage 2 of 3, replica 0 of 1, LlavaForConditionalGeneration.

Holds     model.language_model.layers.3: frozen
          model.language_model.norm: frozen
          lm_head: frozen
Receives  model.language_model.layers.2 f32[2, 20, 48] from stage 1
Sends     gradient of model.language_model.layers.2 f32[2, 20, 48] to stage 1
Order     RECV F 1>2 0 | F 2 0 | B 2 0 | SEND B 2>1 0 | RECV F 1>2 1 | F 2 1 | B 2 1 | SEND B 2>1 1
          | REDUCE
"""

from csc.runtime.weight_names import under

from . import layers

STAGES = (2,)


def forward(batch, received, weights, constants):
    """F of stage 2."""
    (cos, sin, visibility, labels) = layers.tables.of_stage_2(batch, constants)
    layers_2 = received["model.language_model.layers.2"]                                  # f32[2, 20, 48] from stage 1
    layers_3, *saved_layers_3 = layers.llama_decoder_layer_frozen.forward(
        layers_2, cos, sin, visibility, under(weights, "model.language_model.layers.3."),
    )
    norm, *saved_norm = layers.llama_rms_norm_frozen.forward(
        layers_3, under(weights, "model.language_model.norm."),
    )
    loss, *saved_loss = layers.lm_head_frozen.forward(norm, labels, under(weights, "lm_head."))
    sent = {"loss": loss}
    saved = (cos, sin, visibility, labels, saved_layers_3, saved_norm, saved_loss)
    return sent, saved


def backward_input(saved, received, weights, constants):
    """B of stage 2."""
    (cos, sin, visibility, labels, saved_layers_3, saved_norm, saved_loss) = saved; del saved
    d_loss = received["loss"]                                                             # weight of this microbatch in the batch's loss
    d_norm = layers.lm_head_frozen.backward_input(
        saved_loss.pop(), labels, under(weights, "lm_head."), d_loss,
    )
    d_layers_3 = layers.llama_rms_norm_frozen.backward_input(
        saved_norm.pop(), under(weights, "model.language_model.norm."), d_norm,
    )
    d_layers_2 = layers.llama_decoder_layer_frozen.backward_input(
        saved_layers_3.pop(), cos, sin, visibility, under(weights, "model.language_model.layers.3."),
        d_layers_3,
    )
    sent = {"model.language_model.layers.2": d_layers_2}
    return sent, None


def loss_tokens(batch, constants):
    """Labels that the loss of this microbatch is a mean over."""
    return layers.tables.counted_labels(batch, constants)
