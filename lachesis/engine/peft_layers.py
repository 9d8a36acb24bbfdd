"""Find out which layers PEFT adapts for given names; in some families they are not the named
ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from peft import LoraConfig, get_peft_model
from peft.utils.transformers_weight_conversion import (
    convert_peft_adapter_state_dict_for_transformers,
)
from transformers import AutoModelForCausalLM


def find_peft_adapted_layers(config: object, target_modules: Iterable[str]) -> set[str]:
    """Return the paths of the layers that PEFT adapts in a model of this configuration.

    The model is built without memory for its weights. PEFT itself is asked, because it renames
    targets and tensors in several mixtures of experts: there `gate_proj` of a dense layer means the
    experts.

    Raises:
        Exception: PEFT refuses these targets; the type depends on the reason.
    """
    # PEFT warns about tied weights, which do not matter here because nothing is merged.
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config)
        lora_config = LoraConfig(r=1, target_modules=list(target_modules), task_type="CAUSAL_LM")
        peft_model = get_peft_model(model, lora_config)
        tensors = {
            f"{path}.weight": torch.empty(1, 1)
            for path, _ in peft_model.named_modules()
            if path.endswith((".lora_A.default", ".lora_B.default"))
        }
        tensors = {name.replace(".default.", "."): value for name, value in tensors.items()}
        converted = convert_peft_adapter_state_dict_for_transformers(
            peft_model, lora_config, dict(tensors)
        )
    return {
        name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        for name in set(tensors) & set(converted)
        if name.endswith(".lora_A.weight")
    }
