"""The additive digest against an independent implementation in numpy's uint64."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
import torch

from awex_delta.errors import NumericsError
from awex_delta.wire.digest import (
    MODULUS,
    as_unsigned,
    digest,
    digests,
    salt_of,
    signed,
    state_digest,
    sum_at,
    sum_whole,
    sums_by_group,
)

INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def oracle(positions: np.ndarray, bits: np.ndarray, name: str) -> int:
    """splitmix64 at salt + golden * position + bits, one element after the other, in uint64."""
    salt = np.frombuffer(hashlib.blake2b(name.encode(), digest_size=8).digest(), dtype="<u8")[0]
    with np.errstate(over="ignore"):
        state = positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        state += salt + bits.astype(np.int64).astype(np.uint64)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return sum(int(one) for one in state) % MODULUS


def integers(tensor: torch.Tensor) -> np.ndarray:
    """The bits of a tensor, row by row."""
    flat = tensor.contiguous().view(-1)
    return flat.view(INTEGERS.get(tensor.dtype, tensor.dtype)).numpy()


def whole(tensor: torch.Tensor, name: str) -> int:
    """The oracle's digest of a whole tensor."""
    return oracle(np.arange(tensor.numel()), integers(tensor), name)


def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal weights, with a NaN and a negative zero among them."""
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)
    tensor.view(-1)[:2] = torch.tensor([float("nan"), -0.0]).to(dtype)
    return tensor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(2,), (3, 5), (70001,), (3, 4, 5)])
def test_it_is_the_sum_of_splitmix_outputs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = values(*shape, dtype=dtype)
    assert digest(tensor, "model.norm.weight") == whole(tensor, "model.norm.weight")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64])
def test_other_widths(dtype: torch.dtype) -> None:
    tensor = torch.arange(-40, 40).to(dtype)
    assert digest(tensor, "x") == whole(tensor, "x")


def test_a_tensor_of_no_elements_and_an_empty_state_are_zero() -> None:
    assert digest(torch.empty(0, 5), "x") == state_digest({}) == 0


def test_complex_numbers_have_none() -> None:
    with pytest.raises(NumericsError, match="complex64"):
        digest(torch.zeros(2, dtype=torch.complex64), "x")


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda t: t.t(), id="transpose"),
        pytest.param(lambda t: t[:, 3:50], id="columns"),
        pytest.param(lambda t: t[::3], id="every third row"),
        pytest.param(lambda t: t.unfold(1, 7, 7).permute(2, 0, 1), id="permuted"),
    ],
)
def test_strides_do_not_matter(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    strided = view(values(900, 210))
    assert digest(strided, "x") == whole(strided, "x")


def test_parts_add_up_in_any_order() -> None:
    tensor, name = values(501, 300).view(-1), "model.embed_tokens.weight"
    order = torch.randperm(tensor.numel(), generator=torch.Generator().manual_seed(1))
    cuts = torch.tensor_split(order, [7, 7, 70_007, 150_000])
    parts = [sum_at(index, tensor[index], salt_of(name)) for index in cuts]
    assert as_unsigned(sum(parts, torch.zeros((), dtype=torch.int64))) == digest(tensor, name)
    assert digest(tensor, name) == whole(tensor, name)


def test_far_positions_count_modulo_two_to_the_64() -> None:
    index = torch.tensor([0, 2**31, 2**40, 2**62])
    bits = torch.tensor([1, -1, 2, -2], dtype=torch.int16)
    got = as_unsigned(sum_at(index, bits.view(torch.bfloat16), salt_of("x")))
    assert got == oracle(index.numpy(), bits.numpy(), "x")


def test_a_state_is_the_sum_of_its_tensors_under_their_names() -> None:
    first, second = values(30), values(30, 2, dtype=torch.float32)
    assert state_digest({"a": first, "b": second}) == (whole(first, "a") + whole(second, "b")) % MODULUS
    assert state_digest({"a": first, "b": first}) != state_digest({"a": first, "c": first})


@pytest.mark.parametrize("bit", range(16))
def test_every_bit_counts(bit: int) -> None:
    tensor = values(4096)
    flipped = tensor.clone()
    flipped.view(torch.int16)[1234] ^= torch.tensor(1 << bit).to(torch.int16)
    assert digest(flipped, "x") != digest(tensor, "x")


def test_no_two_of_many_small_changes_have_one_digest() -> None:
    tensor = values(300)
    changed = [tensor, *(tensor.roll(shift) for shift in range(1, 300))]  # all moved along
    for i in range(0, 300, 7):  # two elements swapped
        for j in range(i + 1, 300, 11):
            order = torch.arange(300)
            order[[i, j]] = order[[j, i]]
            changed.append(tensor[order])
    for i in range(0, 298, 2):  # one up, its neighbour down: the sum of the bits stays
        steps = torch.zeros(300, dtype=torch.int16)
        steps[i], steps[i + 1] = 1, -1
        changed.append((tensor.view(torch.int16) + steps).view(torch.bfloat16))
    different = {integers(one).tobytes() for one in changed}
    assert len(different) > 1000
    assert len({digest(one, "x") for one in changed}) == len(different)


def test_equal_changes_far_apart_do_not_cancel() -> None:
    """The step of one unit up in half of the elements and down in the others: what an optimizer does."""
    zeros = torch.zeros(1 << 12, dtype=torch.int16)
    seen = set()
    for seed in range(64):
        order = torch.randperm(zeros.numel(), generator=torch.Generator().manual_seed(seed))
        steps = torch.ones_like(zeros)
        steps[order[::2]] = -1
        seen.add(digest(steps.view(torch.bfloat16), "x"))
    assert len(seen) == 64


def test_compiled_is_the_same() -> None:
    tensor = values((1 << 20) + 4099)
    index = torch.arange(0, tensor.numel(), 3)
    assert digest(tensor, "x", compiled=True) == whole(tensor, "x")
    got = as_unsigned(sum_at(index, tensor[index], salt_of("x"), compiled=True))
    assert got == oracle(index.numpy(), integers(tensor[index]), "x")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", [(3, 1), (1, 70_001), (70_001, 1), (300, 257), (3, 70_000)])
def test_rows_count_their_elements_from_where_they_begin(shape: tuple[int, int], compiled: bool) -> None:
    rows = values(*shape)
    first = torch.randint(1 << 40, (shape[0],), generator=torch.Generator().manual_seed(2))
    places = (first[:, None] + torch.arange(shape[1])).view(-1)
    want = oracle(places.numpy(), integers(rows), "x")
    assert as_unsigned(sum_at(first, rows, salt_of("x"), compiled=compiled)) == want
    group = torch.arange(shape[0]) % 2
    salts = torch.tensor([signed(salt_of("x")), signed(salt_of("x"))])
    odd, even = places.view(shape)[1::2].reshape(-1), places.view(shape)[::2].reshape(-1)
    assert [total % MODULUS for total in sums_by_group(first, rows, salts, group).tolist()] == [
        oracle(even.numpy(), integers(rows[::2]), "x"),
        oracle(odd.numpy(), integers(rows[1::2]), "x"),
    ]


def test_memory_is_bounded() -> None:
    tensor = values(1 << 12, 1 << 9).t()  # not contiguous: a copy of it would be 4 MiB
    with torch.profiler.profile(profile_memory=True) as profile:
        sum_whole(tensor, 1)
    sizes = [event.cpu_memory_usage for event in profile.events()]
    assert max(sizes) <= 8 * (1 << 16) + 64


def test_many_tensors_at_once_have_the_digests_of_each() -> None:
    generator = torch.Generator().manual_seed(3)
    sizes = [(0,), (), (1,), (7, 5), (3, 1 << 15), (1 << 16,), *((n,) for n in range(70))]
    dtypes = (torch.bfloat16, torch.float32, torch.int64)
    tensors = {
        f"{place}": torch.randint(-99, 99, size, generator=generator).to(dtypes[place % 3])
        for place, size in enumerate(sizes)
    }
    tensors["turned"] = tensors["3"].t()
    assert digests(tensors.items()) == {name: digest(tensor, name) for name, tensor in tensors.items()}
    assert digests([]) == {}
