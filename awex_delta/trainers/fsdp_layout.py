"""What FSDP2's modules and DTensors say about the part of each parameter that this rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from awex_delta.detection.optimizers import local
from awex_delta.errors import UnsupportedError
from awex_delta.plan.describe import WIRE_DTYPES
from awex_delta.trainers.view import HfPart

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # of activation checkpointing, and of torch.compile


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One parameter or persistent buffer of the model, and what this rank holds of it.

    name: without the prefixes of wrappers, as transformers names it.
    path: its name in the model as it stands.
    tensor: a DTensor, or a tensor that every rank holds whole.
    part: where what this rank holds lies in it.
    served: dtype that the model computes with.
    module: the FSDP module that shards it; None for a tensor that no such module shards.
    """

    name: str
    path: tuple[str, ...]
    tensor: torch.Tensor
    part: HfPart
    served: torch.dtype
    module: FSDPModule | None


def held_tensors(model: nn.Module) -> tuple[list[Held], dict[str, str]]:
    """Every parameter and persistent buffer once, and aliases: other name -> the name that it is listed by.

    Raises:
        UnsupportedError: names what cannot be sent, and why.
    """
    sharding = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    if not sharding:
        raise UnsupportedError(
            f"model={type(model).__name__}: no module of it is under torch.distributed.fsdp.fully_shard. "
            "Remedy: call that on the layers, then on the model, and make the optimizer after that"
        )
    for module in sharding.values():
        module.reshard()  # parameters that stayed gathered after a forward are sharded again
    found, aliases = list[Held](), dict[str, str]()
    names: dict[torch.Tensor, str] = {}
    for path, tensor in _persistent(model):
        name = plain_name(path)
        if names.setdefault(tensor, name) != name:
            aliases[name] = names[tensor]
        else:
            found.append(_held(name, path, tensor, _module_of(path, sharding)))
    return found, aliases


def plain_name(path: str) -> str:
    """The name of a tensor without the prefixes that wrappers put into it."""
    for wrapper in _WRAPPERS:
        path = path.replace(wrapper, "")
    return path


def _persistent(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    saved = {plain_name(name) for name in model.state_dict()}
    yield from model.named_parameters(remove_duplicate=False)
    for path, buffer in model.named_buffers(remove_duplicate=False):
        if plain_name(path) in saved:
            yield path, buffer


def _module_of(path: str, sharding: Mapping[str, FSDPModule]) -> FSDPModule | None:
    """The innermost FSDP module around a parameter: that one shards it."""
    words = path.split(".")[:-1]
    prefixes = (".".join(words[:count]) for count in range(len(words), -1, -1))
    return next((sharding[prefix] for prefix in prefixes if prefix in sharding), None)


def _held(name: str, path: str, tensor: torch.Tensor, module: FSDPModule | None) -> Held:
    if not isinstance(tensor, DTensor):
        if tensor.requires_grad:
            raise UnsupportedError(
                f"{name} is trained, but no fully_shard module shards it. Remedy: call fully_shard on the "
                "model itself after its layers, without it in ignored_params, or freeze it"
            )
        part, served = HfPart(offset=(0,) * tensor.dim(), whole=tuple(tensor.shape)), tensor.dtype
        module = None
    else:
        if module is None:
            raise UnsupportedError(
                f"{name} is a DTensor on {tensor.device_mesh}, but lies in no fully_shard module. Remedy: "
                "call fully_shard on the model itself after its layers"
            )
        part, served = part_of(name, tensor), _served_dtype(tensor, module)
        _check_memory(name, tensor)
    if served not in WIRE_DTYPES.values():
        raise UnsupportedError(
            f"{name} is computed with in {served}; only {', '.join(sorted(WIRE_DTYPES))} can be sent. "
            "Remedy: give fully_shard mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
        )
    return Held(
        name=name, path=tuple(path.split(".")), tensor=tensor, part=part, served=served, module=module
    )


def part_of(name: str, tensor: DTensor) -> HfPart:
    """Where this rank's part of a DTensor lies: a rectangle, with FSDP, HSDP and tensor parallelism.

    Each placement in turn cuts what is left as `torch.chunk` does. FSDP cuts what tensor parallelism has cut
    already, and marks its own placement as strided if both cut the same dimension; so that one comes last.

    Raises:
        UnsupportedError: a placement is neither Shard nor Replicate, or the part has another shape.
    """
    mesh, offset, size = tensor.device_mesh, [0] * tensor.dim(), list(tensor.shape)
    coordinate, cuts = mesh.get_coordinate(), _cuts(tensor)
    for number, dim in cuts or ():
        if coordinate is None:  # a rank outside of the mesh
            break
        chunk = -(-size[dim] // mesh.size(number))
        start = min(coordinate[number] * chunk, size[dim])
        offset[dim], size[dim] = offset[dim] + start, min(chunk, size[dim] - start)
    if coordinate is None or cuts is None or tuple(size) != tuple(local(tensor).shape):
        raise UnsupportedError(
            f"{name}: placements={tensor.placements} on {mesh}, of which this rank holds "
            f"{tuple(local(tensor).shape)} of {tuple(tensor.shape)}: only rows and columns that Shard and "
            "Replicate cut are known. Remedy: train on a mesh of fully_shard alone, or on one of HSDP"
        )
    return HfPart(offset=tuple(offset), whole=tuple(tensor.shape))


def _cuts(tensor: DTensor) -> list[tuple[int, int]] | None:
    """Dimension of the mesh and of the tensor for each cut, in order; None if a placement is not known."""
    plain, strided = list[tuple[int, int]](), list[tuple[int, int]]()
    for number, placement in enumerate(tensor.placements):
        one: Any = placement
        if type(one).__name__ == "_StridedShard":  # torch has no public name for it
            later = [p for p in tensor.placements[number + 1 :] if isinstance(p, Shard) and p.dim == one.dim]
            sizes = [tensor.device_mesh.size(tensor.placements.index(p)) for p in later]
            if one.split_factor != math.prod(sizes):
                return None
            strided.insert(0, (number, one.dim))
        elif isinstance(one, Shard):
            plain.append((number, one.dim))
        elif not isinstance(one, Replicate):
            return None
    return plain + strided


def _served_dtype(tensor: torch.Tensor, module: FSDPModule) -> torch.dtype:
    """What FSDP gathers a parameter in: torch has no public name for the policy of a module."""
    try:
        policy = module._get_fsdp_state()._mp_policy  # noqa: SLF001
    except AttributeError as error:
        raise UnsupportedError(
            f"torch {torch.__version__}: {type(module).__name__} has no attribute {error.name}, which tells "
            "its MixedPrecisionPolicy; torch 2.6 to 2.13 have it"
        ) from error
    if policy.param_dtype is None or not tensor.is_floating_point():
        return tensor.dtype
    dtype: torch.dtype = policy.param_dtype
    return dtype


def _check_memory(name: str, tensor: DTensor) -> None:
    here = local(tensor)
    if type(here) is not torch.Tensor:
        raise UnsupportedError(
            f"{name} is held as {type(here).__name__}: only plain tensors can be sent. Remedy: train without "
            "quantised parameters"
        )
    if here.device.type != tensor.device_mesh.device_type:
        raise UnsupportedError(
            f"{name} lies on {here.device}, its mesh on {tensor.device_mesh.device_type}. Remedy: call "
            "fully_shard without offload_policy=CPUOffloadPolicy(), and load weights that are on meta first"
        )


def optimizer_of(optimizers: Sequence[object], held: Sequence[Held]) -> dict[str, torch.optim.Optimizer]:
    """Which optimizer steps each parameter, by name.

    Raises:
        UnsupportedError: something is no optimizer, a trained parameter is stepped by none, or an optimizer
            steps what is not in the model.
    """
    names = {one.tensor: one.name for one in held}
    found: dict[str, torch.optim.Optimizer] = {}
    foreign = 0
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UnsupportedError(
                f"optimizer={type(optimizer).__name__}: give a torch.optim.Optimizer, or a list of several"
            )
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            if param in names:
                found[names[param]] = optimizer
            else:
                foreign += 1
    if foreign:
        raise UnsupportedError(
            f"optimizer: {foreign} of its parameters are not in the model. Remedy: make the optimizer from "
            "model.parameters() after fully_shard, which replaces them"
        )
    unstepped = [one.name for one in held if one.tensor.requires_grad and one.name not in found]
    if unstepped:
        raise UnsupportedError(
            f"{unstepped[0]} is trained, but no optimizer steps it. Remedy: give all optimizers of the "
            "model, or freeze the parameter"
        )
    return found


def trainer_rank() -> tuple[int, int]:
    """This rank among the trainers, and how many there are: those of torch's default process group."""
    return dist.get_rank(), dist.get_world_size()
