"""llava_multi_modal_projector_first: LlavaMultiModalProjector, one region.

Regions  model.multi_modal_projector
F        2 matmuls, 138,240 FLOPs
B        no gradient passes through
W        3 matmuls, 221,184 FLOPs
"""

import torch

aten = torch.ops.aten


def forward(image_features, w):
    """F."""
    # image_features                                                                      # f32[2, 10, 32]
    # w[linear_1.weight]                                                                  # f32[48, 32]
    # w[linear_1.bias]                                                                    # f32[48]
    # w[linear_2.weight]                                                                  # f32[48, 48]
    # w[linear_2.bias]                                                                    # f32[48]
    model_slice = image_features.narrow(1, 1, 9)                                          # f32[2, 9, 32]  modeling_llava.py
    linear_1_t = torch.t(w["linear_1.weight"])                                            # f32[32, 48]  modeling_llava.py
    linear_1_clone = model_slice.clone(memory_format=torch.contiguous_format); del model_slice  # f32[2, 9, 32]  modeling_llava.py
    linear_1_unsafe_view = linear_1_clone.view(18, 32); del linear_1_clone                # f32[18, 32]  modeling_llava.py
    linear_1_mm = torch.mm(linear_1_unsafe_view, linear_1_t); del linear_1_t              # f32[18, 48]  modeling_llava.py
    linear_1_unsafe_view_1 = linear_1_mm.view(2, 9, 48); del linear_1_mm                  # f32[2, 9, 48]  modeling_llava.py
    linear_1 = linear_1_unsafe_view_1.add_(w["linear_1.bias"]); del linear_1_unsafe_view_1  # f32[2, 9, 48]  modeling_llava.py
    act = aten.gelu.default(linear_1)                                                     # f32[2, 9, 48]  activations.py
    linear_2_view = act.view(18, 48); del act                                             # f32[18, 48]  modeling_llava.py
    linear_2_t = torch.t(w["linear_2.weight"])                                            # f32[48, 48]  modeling_llava.py
    linear_2_addmm = torch.addmm(w["linear_2.bias"], linear_2_view, linear_2_t); del linear_2_t  # f32[18, 48]  modeling_llava.py
    linear_2 = linear_2_addmm.view(2, 9, 48); del linear_2_addmm                          # f32[2, 9, 48]  modeling_llava.py
    saved = (linear_1_unsafe_view, linear_1, linear_2_view)
    return linear_2, saved


def backward_input(saved, d_linear_2):
    """No gradient passes on from here: keep what W needs."""
    # d_linear_2                                                                          # f32[2, 9, 48]
    (linear_1_unsafe_view, linear_1, linear_2_view) = saved; del saved
    stashed = (d_linear_2, linear_1_unsafe_view, linear_1, linear_2_view)
    return stashed


def backward_weight(stashed, w):
    """W: gradients of the parameters that train, by local name."""
    (d_linear_2, linear_1_unsafe_view, linear_1, linear_2_view) = stashed; del stashed
    d_linear_2_view = d_linear_2.view(18, 48); del d_linear_2                             # f32[18, 48]  modeling_llava.py
    d_linear_2_mm = torch.mm(d_linear_2_view, w["linear_2.weight"])                       # f32[18, 48]  modeling_llava.py
    d_linear_2_t = torch.t(d_linear_2_view)                                               # f32[48, 18]  modeling_llava.py
    d_linear_2_mm_1 = torch.mm(d_linear_2_t, linear_2_view); del d_linear_2_t, linear_2_view  # f32[48, 48]  modeling_llava.py
    d_linear_2_sum = torch.sum(d_linear_2_view, [0], True); del d_linear_2_view           # f32[1, 48]  modeling_llava.py
    d_linear_2_view_1 = d_linear_2_sum.view(48); del d_linear_2_sum                       # f32[48]  modeling_llava.py
    d_linear_2_view_2 = d_linear_2_mm.view(2, 9, 48); del d_linear_2_mm                   # f32[2, 9, 48]  modeling_llava.py
    d_act_gelu_backward = aten.gelu_backward.grad_input(                                  # f32[2, 9, 48]  activations.py
        d_linear_2_view_2, linear_1, grad_input=d_linear_2_view_2,
    )
    del d_linear_2_view_2, linear_1
    d_linear_1_sum = torch.sum(d_act_gelu_backward, [0, 1], True)                         # f32[1, 1, 48]  modeling_llava.py
    d_linear_1_view = d_linear_1_sum.view(48); del d_linear_1_sum                         # f32[48]  modeling_llava.py
    d_linear_1_view_1 = d_act_gelu_backward.view(18, 48); del d_act_gelu_backward         # f32[18, 48]  modeling_llava.py
    d_linear_1_t = torch.t(d_linear_1_view_1); del d_linear_1_view_1                      # f32[48, 18]  modeling_llava.py
    d_linear_1_mm = torch.mm(d_linear_1_t, linear_1_unsafe_view)                          # f32[48, 32]  modeling_llava.py
    del d_linear_1_t, linear_1_unsafe_view
    return {
        "linear_1.weight": d_linear_1_mm,
        "linear_1.bias": d_linear_1_view,
        "linear_2.weight": d_linear_2_mm_1,
        "linear_2.bias": d_linear_2_view_1,
    }
