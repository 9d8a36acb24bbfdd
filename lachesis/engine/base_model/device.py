"""Measure the free memory of a device, and recognise when the device has run out of memory."""

import gc

import psutil
import torch

GIB = 2**30


def choose_device() -> torch.device:
    """Return the first CUDA card, or the processor if there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def describe_device(device: torch.device) -> str:
    """Return the name of a card, or `the processor`."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return "the processor"


def measure_free_bytes(device: torch.device) -> int:
    """Return how many bytes this process can still take on the device."""
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        # PyTorch keeps memory that it has freed, and uses it again.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free_bytes + unused)
    return int(psutil.virtual_memory().available)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the device has no memory left."""
    # PyTorch has a class of its own for cards; on the processor only the text tells.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def release_cached_memory(device: torch.device) -> None:
    """Give back memory that PyTorch keeps for later, so that larger blocks fit again."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
