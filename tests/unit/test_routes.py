"""Routes of a model with many layers and experts: what is taken over from one parameter to the next."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch

from awex_delta.conversion.relocation import Prover, Relocation, kind_of
from awex_delta.conversion.routes import Conversion, Output, Route, find_routes
from awex_delta.errors import UnsupportedError
from awex_delta.trainers.view import TrainerView, WeightInfo
from benchmarks.prove import Rank

Named = list[tuple[str, torch.Tensor]]
Operation = Callable[[torch.Tensor], torch.Tensor]

LAYERS, EXPERTS = 3, 4
ODD = "decoder.layers.1.mlp.experts.linear_fc1.weight2"


def weight(param: str, shape: tuple[int, ...], *, owners: tuple[int, ...] = (0,)) -> WeightInfo:
    return WeightInfo(
        param=param,
        chunk=0,
        shape=shape,
        dtype=torch.bfloat16,
        owners=owners,
        owned_start=0,
        owned_stop=torch.Size(shape).numel() if owners else 0,
    )


class Model:
    """A trainer rank that holds fc1 of every expert, and notes what its converter is given."""

    def __init__(self, shape: tuple[int, ...], change: Operation, odd: Sequence[str] = (ODD,)) -> None:
        self.calls: list[tuple[str, torch.Tensor]] = []
        self._shape, self._change, self._odd = shape, change, odd

    def weights(self) -> Sequence[WeightInfo]:
        return [
            weight(f"decoder.layers.{layer}.mlp.experts.linear_fc1.weight{expert}", self._shape)
            for layer in range(LAYERS)
            for expert in range(EXPERTS)
        ]

    def convert(self, key: str, tensor: torch.Tensor) -> Named:
        self.calls.append((key, tensor))
        param = key.removeprefix("0/")
        return gate_up(param, self._change(tensor) if param in self._odd else tensor)


def gate_up(param: str, tensor: torch.Tensor) -> Named:
    gate, up = tensor.chunk(2)
    return [(f"{param}.gate", gate), (f"{param}.up", up)]


def routes_of(view: object) -> dict[str, Route]:
    return find_routes(cast(TrainerView, view), 0)


def runs(relocations: tuple[Relocation, ...] | None) -> list[list[list[int]]] | None:
    if relocations is None:
        return None
    return [torch.stack((one.src, one.dst, one.length)).T.tolist() for one in relocations]


def by_runs(relocations: tuple[Relocation, ...], flat: torch.Tensor) -> list[torch.Tensor]:
    """The outputs, element by element as the runs say."""
    outputs = []
    for one in relocations:
        out = torch.full((torch.Size(one.shape).numel(),), -1, dtype=flat.dtype)
        for src, dst, length in torch.stack((one.src, one.dst, one.length)).T.tolist():
            out[dst : dst + length] = flat[src : src + length]
        outputs.append(out.view(one.shape))
    return outputs


def swap_halves(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat(tensor.chunk(2)[::-1])


def swap(first: tuple[int, ...], second: tuple[int, ...]) -> Operation:
    """Exchange two rows, or two elements."""

    def swapped(tensor: torch.Tensor) -> torch.Tensor:
        out = tensor.clone()
        if not out.is_meta:
            out[first], out[second] = tensor[second], tensor[first]
        return out

    return swapped


def swap_columns(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat((tensor[:, 7:8], tensor[:, 1:7], tensor[:, :1], tensor[:, 8:]), dim=1)


def negate_zero(tensor: torch.Tensor) -> torch.Tensor:
    return torch.where(tensor == 0, -tensor, tensor) if tensor.is_floating_point() else tensor


def flush_subnormals(tensor: torch.Tensor) -> torch.Tensor:
    return torch.where(tensor.abs() < 1e-37, 0, tensor) if tensor.is_floating_point() else tensor


@pytest.mark.parametrize(
    "param",
    [
        "decoder.layers.17.mlp.experts.local_experts.3.linear_fc1.weight",
        "decoder.layers.2.x.linear_fc2.bias11",
    ],
)
def test_a_kind_keeps_the_numbers_that_are_part_of_a_name(param: str) -> None:
    assert kind_of(param) in (
        "decoder.layers.#.mlp.experts.local_experts.#.linear_fc1.weight",
        "decoder.layers.#.x.linear_fc2.bias#",
    )


def test_a_kind_is_proved_once_and_each_parameter_is_checked_once() -> None:
    model = Model((64, 128), lambda x: x)
    routes = routes_of(model)
    assert all(runs(route.relocations) == [[[0, 0, 4096]], [[4096, 0, 4096]]] for route in routes.values())
    tables = {one.src.data_ptr() for route in routes.values() for one in route.relocations or ()}
    assert len(tables) == 2, "parameters of one kind share their runs"
    infos = {info.key: info for info in model.weights()}
    assert {tuple(tensor.shape) for _, tensor in model.calls} == {(64, 128)}
    given = Counter((key, tensor.device.type, tensor.dtype) for key, tensor in model.calls)
    first = model.weights()[0].key
    expected = Counter({(key, "meta", torch.bfloat16): 1 for key in infos})
    expected.update({(key, "cpu", torch.bfloat16): 1 for key in infos})
    expected.update({(first, "cpu", torch.uint8): 2})  # 8192 elements have numbers of two bytes
    assert given == expected


def test_each_parameter_is_checked_with_bits_of_its_own() -> None:
    model = Model((64, 128), lambda x: x)
    routes_of(model)
    checks = [tensor.view(torch.int16) for _, tensor in model.calls if tensor.dtype is torch.bfloat16]
    flat = [tensor.reshape(-1).tolist() for tensor in checks if not tensor.is_meta]
    assert len(flat) == LAYERS * EXPERTS
    for one, other in itertools.pairwise(flat):
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 50
    values = torch.cat([tensor.view(torch.bfloat16).view(-1) for tensor in checks if not tensor.is_meta])
    assert bool(values.isfinite().all())
    bits = values.view(torch.int16)
    assert len(set(bits.tolist())) > 6_000
    assert int((bits == 0).sum()) > 100
    assert int((bits == -(1 << 15)).sum()) > 100
    assert int(((values != 0) & (values.abs() < 1.17e-38)).sum()) > 100, "no subnormals"


MOVES = [
    pytest.param(swap_halves, id="swaps gate and up"),
    pytest.param(lambda x: x.flip(0), id="turns the rows round"),
    pytest.param(lambda x: x.roll(1, 0), id="rolls the rows"),
    pytest.param(lambda x: x.roll(1, 1), id="rolls the columns"),
    pytest.param(swap_columns, id="swaps two columns"),
    pytest.param(swap((62,), (63,)), id="swaps two rows"),
    pytest.param(swap((5, 3), (40, 100)), id="swaps two elements"),
    pytest.param(lambda x: x.t().contiguous().view(x.shape), id="transposes"),
    pytest.param(lambda x: x.t().reshape(x.shape), id="transposes a view"),
]


@pytest.mark.parametrize("operation", MOVES)
@pytest.mark.parametrize("shape", [(64, 128), (128, 128), (600, 512)])
@pytest.mark.parametrize("odd", [ODD, "decoder.layers.0.mlp.experts.linear_fc1.weight0"])
def test_one_odd_expert_of_one_layer_is_found(operation: Operation, shape: tuple[int, int], odd: str) -> None:
    plain, flat = Model(shape, lambda x: x), torch.arange(torch.Size(shape).numel())
    expected = runs(routes_of(plain)["0/" + ODD].relocations)
    for key, route in routes_of(Model(shape, operation, (odd,))).items():
        if key != "0/" + odd:
            assert runs(route.relocations) == expected
        elif route.relocations is None:  # too many runs
            assert not any(output.sparse for output in route.outputs)
        else:
            wanted = operation(flat.view(shape)).chunk(2)
            assert [out.tolist() for out in by_runs(route.relocations, flat)] == [
                out.tolist() for out in wanted
            ]


def test_swapped_halves_of_one_expert_stay_sparse() -> None:
    route = routes_of(Model((600, 512), swap_halves))["0/" + ODD]
    assert runs(route.relocations) == [[[153_600, 0, 153_600]], [[0, 0, 153_600]]]


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(lambda x: x * 2, id="scales"),
        pytest.param(lambda x: x * 1.01, id="scales a little"),
        pytest.param(lambda x: x + 0, id="adds zero"),
        pytest.param(lambda x: -x, id="negates"),
        pytest.param(negate_zero, id="negates zero"),
        pytest.param(flush_subnormals, id="flushes subnormals"),
        pytest.param(lambda x: x.clamp(max=448), id="clamps"),
        pytest.param(lambda x: x.float().half().to(x.dtype), id="loses bits on the way"),
        pytest.param(lambda x: x.float(), id="casts: another dtype than its siblings"),
        pytest.param(lambda x: x.mul_(2), id="writes into what it is given"),
        pytest.param(lambda x: x.zero_(), id="wipes what it is given"),
    ],
)
@pytest.mark.parametrize("shape", [(2, 1), (64, 128), (600, 512)])
def test_one_expert_that_is_computed_is_found(operation: Operation, shape: tuple[int, int]) -> None:
    routes = routes_of(Model(shape, operation))
    for key, route in routes.items():
        name = key.removeprefix("0/")
        if key != "0/" + ODD:
            assert [output.name for output in route.outputs] == [f"{name}.gate", f"{name}.up"]
            assert all(output.sparse for output in route.outputs)
    odd = routes["0/" + ODD]
    assert [output.name for output in odd.outputs] == [f"{ODD}.gate", f"{ODD}.up"]
    if odd.outputs[0].dtype is torch.float32:  # a cast, and no computation
        assert odd.relocations is not None
        assert {one.dtype for one in odd.relocations} == {torch.float32}
    else:
        assert odd.relocations is None
        assert not any(output.sparse for output in odd.outputs)


def test_a_whole_layer_that_differs_is_proved_once() -> None:
    odd = [f"decoder.layers.1.mlp.experts.linear_fc1.weight{expert}" for expert in range(EXPERTS)]
    model = Model((64, 128), swap_halves, odd)
    routes = routes_of(model)
    swapped = [[[4096, 0, 4096]], [[0, 0, 4096]]]
    assert [key for key, route in routes.items() if runs(route.relocations) == swapped] == [
        f"0/{param}" for param in odd
    ]
    proved = Counter(key for key, tensor in model.calls if tensor.dtype is torch.uint8)
    assert len(proved) == 3, "one parameter before, in and after the odd layer"


def test_a_converter_that_repeats_its_last_answer_is_found() -> None:
    class Stale(Model):
        last: torch.Tensor

        def convert(self, key: str, tensor: torch.Tensor) -> Named:
            if tensor.is_meta or tensor.dtype is torch.uint8:
                return super().convert(key, tensor)
            shown = self.last if key == "0/" + ODD else tensor
            self.last = tensor
            return super().convert(key, shown)

    assert routes_of(Stale((64, 128), lambda x: x))["0/" + ODD].relocations is None


@pytest.mark.parametrize(
    "otherwise",
    [
        pytest.param(lambda name, out: (name + "x", out), id="name"),
        pytest.param(lambda name, out: (name, out.view(-1)), id="shape"),
        pytest.param(lambda name, out: (name, out.float()), id="dtype"),
    ],
)
def test_real_outputs_must_be_those_that_were_told_without_data(
    otherwise: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]],
) -> None:
    class Liar(Model):
        def convert(self, key: str, tensor: torch.Tensor) -> Named:
            honest = super().convert(key, tensor)
            if key != "0/" + ODD or tensor.is_meta or tensor.dtype is torch.uint8:
                return honest
            return [otherwise(name, out) for name, out in honest]

    routes = routes_of(Liar((64, 128), lambda x: x))
    assert [key for key, route in routes.items() if route.relocations is None] == ["0/" + ODD]


def test_a_default_device_does_not_move_the_proof() -> None:
    model = Model((64, 128), swap_halves)
    with torch.device("meta"):
        routes = routes_of(model)
    assert runs(routes["0/" + ODD].relocations) == [[[4096, 0, 4096]], [[0, 0, 4096]]]


def test_numbers_alone_do_not_make_a_kind() -> None:
    """Parameters of equal kind and another shape or dtype are proved for themselves."""
    prover, seen = Prover(0), list[torch.dtype]()

    def convert(tensor: torch.Tensor) -> Named:
        seen.append(tensor.dtype)
        return [("a", tensor)]

    for shape, dtype in (((80, 80), torch.bfloat16), ((80, 81), torch.bfloat16), ((80, 80), torch.float32)):
        seen.clear()
        like = torch.empty(shape, dtype=dtype, device="meta")
        assert prover.prove("layers.1.a", convert, like, convert(like)) is not None
        assert torch.uint8 in seen
    seen.clear()
    like = torch.empty(80, 80, dtype=torch.bfloat16, device="meta")
    assert prover.prove("layers.2.a", convert, like, convert(like)) is not None
    assert torch.uint8 not in seen


def test_what_no_optimizer_owns_travels_whole_and_is_converted_on_the_meta_device_alone() -> None:
    class Frozen(Model):
        def weights(self) -> Sequence[WeightInfo]:
            return [weight("w", (4, 2), owners=())]

    model = Frozen((4, 2), lambda x: x)
    (route,) = routes_of(model).values()
    assert route.relocations is None
    assert route.outputs == tuple(
        Output(name=name, shape=(2, 2), dtype=torch.bfloat16, sparse=False) for name in ("w.gate", "w.up")
    )
    assert [tensor.device.type for _, tensor in model.calls] == ["meta"]


def test_live_weights_are_converted_and_another_shape_than_that_of_connect_is_refused() -> None:
    class Live(Model):
        live = {"0/w": torch.arange(8.0).view(4, 2).bfloat16()}  # noqa: RUF012

        def weights(self) -> Sequence[WeightInfo]:
            return [weight("w", (4, 2))]

        def tensor(self, key: str) -> torch.Tensor:
            return self.live[key]

    view: Any = Live((4, 2), lambda x: x)
    routes = routes_of(view)
    converted = Conversion(view, routes).all()
    assert {name: tensor.flatten().tolist() for name, tensor in converted.items()} == {
        "w.gate": [0, 1, 2, 3],
        "w.up": [4, 5, 6, 7],
    }
    view.live = {"0/w": torch.zeros(4, 2)}
    with pytest.raises(UnsupportedError, match="at connect"):
        Conversion(view, routes).all()


def test_a_writer_does_not_weaken_the_checks_of_its_siblings() -> None:
    after = "decoder.layers.1.mlp.experts.linear_fc1.weight3"

    class Wiping(Model):
        def convert(self, key: str, tensor: torch.Tensor) -> Named:
            converted = super().convert(key, tensor)
            return gate_up(after, tensor.flip(0)) if key == "0/" + after else converted

    routes = routes_of(Wiping((64, 128), lambda x: x.zero_()))
    assert routes["0/" + ODD].relocations is None
    flipped = runs(routes["0/" + after].relocations)
    assert flipped is not None
    assert flipped[0][0] == [63 * 128, 0, 128]


def test_awex_experts_and_layers_get_their_own_names() -> None:
    rank = Rank(layers=2, experts=2, hidden=64, vocab_size=320)
    names = [output.name for route in routes_of(rank).values() for output in route.outputs]
    expected = ["model.embed_tokens.weight"]
    for layer in ("model.layers.0", "model.layers.1"):
        expected += [f"{layer}.self_attn.o_proj.weight", f"{layer}.input_layernorm.weight"]
        expected += [f"{layer}.self_attn.{letter}_proj.weight" for letter in "qkv"]
        expected += [f"{layer}.self_attn.{letter}_norm.weight" for letter in "qk"]
        expected += [f"{layer}.post_attention_layernorm.weight", f"{layer}.mlp.gate.weight"]
        for expert in (0, 1):
            expected += [f"{layer}.mlp.experts.{expert}.{part}_proj.weight" for part in ("gate", "up")]
        expected += [f"{layer}.mlp.experts.{expert}.down_proj.weight" for expert in (0, 1)]
    assert names == [*expected, "model.norm.weight", "lm_head.weight"]
