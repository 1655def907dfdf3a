"""Rank 1 of 3: stage 1 of 3, replica 0 of 1, LlavaForConditionalGeneration.

Holds     model.language_model.layers.1 ... model.language_model.layers.2 (2 layers): frozen
Receives  model.language_model.layers.0 f32[2, 20, 48] from stage 0
          gradient of model.language_model.layers.2 f32[2, 20, 48] from stage 2
Sends     model.language_model.layers.2 f32[2, 20, 48] to stage 2
          gradient of model.language_model.layers.0 f32[2, 20, 48] to stage 0
Order     RECV F 0>1 0 | F 1 0 | SEND F 1>2 0 | RECV F 0>1 1 | F 1 1 | SEND F 1>2 1 | RECV B 2>1 0 |
          B 1 0 | SEND B 1>0 0 | RECV B 2>1 1 | B 1 1 | SEND B 1>0 1 | REDUCE
"""

from csc.runtime.weight_names import under

from . import layers

STAGES = (1,)
LAYERS_1_TO_2 = [f"model.language_model.layers.{i}." for i in range(1, 3)]


def forward(batch, received, weights, constants):
    """F of stage 1."""
    (cos, sin, visibility) = layers.tables.of_stage_1(batch, constants)
    layers_0 = received["model.language_model.layers.0"]                                  # f32[2, 20, 48] from stage 0
    hidden_states = layers_0
    saved_layers_1_to_2 = []
    for layer in LAYERS_1_TO_2:
        hidden_states, saved = layers.llama_decoder_layer_frozen.forward(
            hidden_states, cos, sin, visibility, under(weights, layer),
        )
        saved_layers_1_to_2.append(saved)
    layers_2 = hidden_states
    sent = {"model.language_model.layers.2": layers_2}
    saved = (cos, sin, visibility, saved_layers_1_to_2)
    return sent, saved


def backward_input(saved, received, weights, constants):
    """B of stage 1."""
    (cos, sin, visibility, saved_layers_1_to_2) = saved; del saved
    d_layers_2 = received["model.language_model.layers.2"]                                # f32[2, 20, 48] from stage 2
    d_hidden_states = d_layers_2
    for layer in reversed(LAYERS_1_TO_2):
        d_hidden_states = layers.llama_decoder_layer_frozen.backward_input(
            saved_layers_1_to_2.pop(), cos, sin, visibility, under(weights, layer), d_hidden_states,
        )
    d_layers_0 = d_hidden_states
    sent = {"model.language_model.layers.0": d_layers_0}
    return sent, None
