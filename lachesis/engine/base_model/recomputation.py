"""Switch between storing the activations inside a model's layers and computing them again.

Computing them again for the gradient (Chen et al. 2016, arXiv:1604.06174) takes about a third more
time and leaves only the input of each layer in memory.
"""

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def set_recomputation(module: PreTrainedModel, is_on: bool) -> None:
    """Set whether layers compute their activations again, where the model can."""
    if not getattr(module, "supports_gradient_checkpointing", False):
        return
    if is_on:
        module.activation_checkpointing_enable({"use_reentrant": False})
    else:
        module.activation_checkpointing_disable()
    for layer in module.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            # Layers do so only in training. This leaves their parts, such as dropout, as they are.
            layer.training = is_on
