"""Keyed dropout: its masks, against torch's own layers and across ways to train."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcog.algorithms import Algorithm, ClientContext, FedCOG, FedSAM
from fedcog.core.tree import Params, State
from fedcog.models.checks import ModelError
from fedcog.models.functional import Model
from fedcog.models.ops.dropout import ALPHA, KeyedDropout
from fedcog.models.ops.keyed_random import StepKey, seed_words, trial_key
from fedcog.testing import ToyFederation, max_difference
from tests.support.user_models import USER_MODELS


def make_key(seed: int = 0, round: int = 0, client: int = 0, step: int = 0) -> StepKey:
    numbers = (torch.tensor(number) for number in (round, client, step))
    return StepKey(seed_words(seed), *numbers)


def draw(key: StepKey, size: int = 4096, is_mapped: bool = False) -> Tensor:
    with KeyedDropout(key, is_mapped):
        return F.dropout(torch.ones(size), 0.25)


def test_dropout_keeps_the_expected_fraction_and_the_mean() -> None:
    size = 40_000
    dropped = draw(make_key(), size)
    fraction = float((dropped == 0).double().mean())
    assert abs(fraction - 0.25) < 4 * math.sqrt(0.25 * 0.75 / size)
    assert dropped.unique().tolist() == pytest.approx([0, 1 / 0.75])


@pytest.mark.parametrize("change", ["seed", "round", "client", "step"])
def test_masks_depend_on_every_part_of_the_key(change: str) -> None:
    first = draw(make_key())
    other = draw(make_key(**{change: 1}))
    assert torch.equal(first, draw(make_key()))
    agreement = float(((first == 0) == (other == 0)).double().mean())
    assert agreement == pytest.approx(0.25**2 + 0.75**2, abs=0.04)


def test_each_call_of_a_pass_draws_another_mask() -> None:
    x = torch.ones(64)
    with KeyedDropout(make_key()) as mode:
        first = F.dropout(x)
        second = F.dropout(x)
    assert mode.num_calls == 2 and not torch.equal(first, second)


def test_mapped_masks_equal_those_of_single_clients() -> None:
    words = torch.stack([seed_words(seed) for seed in (3, 4)])
    zero = torch.tensor(0)

    def masked(words: Tensor, client: Tensor) -> Tensor:
        return draw(StepKey(words, zero, client, zero), 50, is_mapped=True)

    together = torch.func.vmap(masked)(words, torch.tensor([0, 7]))
    assert torch.equal(together[0], draw(make_key(3), 50))
    assert torch.equal(together[1], draw(make_key(4, client=7), 50))


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "values": (lambda: nn.Dropout(0.4), (6, 5, 4, 3), (6, 5, 4, 3)),
    "1d": (lambda: nn.Dropout1d(0.4), (6, 5, 4), (6, 5, 1)),
    "1d, no batch": (lambda: nn.Dropout1d(0.4), (30, 4), (30, 1)),
    "2d": (lambda: nn.Dropout2d(0.4), (6, 5, 4, 3), (6, 5, 1, 1)),
    "3d": (lambda: nn.Dropout3d(0.4), (6, 5, 4, 3, 2), (6, 5, 1, 1, 1)),
    "alpha": (lambda: nn.AlphaDropout(0.4), (6, 5), (6, 5)),
    "feature alpha": (lambda: nn.FeatureAlphaDropout(0.4), (6, 5, 4, 3), (6, 5, 1, 1)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_drop_as_torch_does(name: str) -> None:
    """A value is either dropped or scaled, in blocks of the right shape, as in torch's layer."""
    build, shape, mask_shape = LAYERS[name]
    layer = build()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) + 3
    with KeyedDropout(make_key()):
        output = layer(x)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        reference = layer(x)
    if "alpha" in name:
        scale = ((ALPHA**2 * 0.4 + 1) * 0.6) ** -0.5
        dropped_value = scale * ALPHA * (0.4 - 1)
        kept = scale * x + scale * ALPHA * 0.4
    else:
        dropped_value = 0.0
        kept = x / 0.6
    for result in (output, reference):
        is_dropped = (result - dropped_value).abs() < 1e-5
        assert 0 < int(is_dropped.sum()) < x.numel()
        assert torch.allclose(result[~is_dropped], kept[~is_dropped], atol=1e-5)
        blocks = is_dropped.reshape(*mask_shape[: len([s for s in mask_shape if s > 1])], -1)
        assert bool((blocks.all(-1) | ~blocks.any(-1)).all())
    assert not torch.equal(layer.eval()(x), output) and torch.equal(layer.eval()(x), x)


def test_in_place_dropout_writes_over_its_input() -> None:
    x = torch.ones(100)
    with KeyedDropout(make_key()):
        nn.functional.dropout(x, 0.5, inplace=True)
    with KeyedDropout(make_key()):
        assert torch.equal(x, F.dropout(torch.ones(100), 0.5))


def test_attention_without_dropout_equals_torch() -> None:
    """The plain operators that attention with dropout uses compute what torch's kernel does."""
    from fedcog.models.ops.dropout import _attention

    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, 5, 4, generator=generator) for _ in range(3))
    mask = torch.rand(5, 5, generator=generator) > 0.3
    mask |= torch.eye(5, dtype=torch.bool)
    nothing = mask & (torch.arange(5) != 2)[:, None]  # query 2 may attend to nothing
    for options in (
        {},
        {"is_causal": True},
        {"attn_mask": mask},
        {"attn_mask": nothing},
        {"attn_mask": torch.zeros(5, 5).masked_fill(~nothing, -torch.inf)},
        {"attn_mask": torch.randn(5, 5, generator=generator), "scale": 0.3},
    ):
        expected = F.scaled_dot_product_attention(query, key, value, **options)
        with KeyedDropout(make_key()) as mode:
            actual = _attention(mode, query, key, value, dropout_p=1e-12, **options)
        assert mode.num_calls == 1
        assert torch.allclose(actual, expected, atol=1e-6)


def test_multi_head_attention_uses_keyed_dropout_on_both_of_its_ways() -> None:
    layer = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
    x = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    state = torch.random.get_rng_state()
    for need_weights in (True, False):
        outputs = []
        for _ in range(2):
            with KeyedDropout(make_key()) as mode:
                outputs.append(layer(x, x, x, need_weights=need_weights)[0])
            assert mode.num_calls == 1
        assert torch.equal(*outputs)
        with KeyedDropout(make_key(step=1)):
            assert not torch.equal(outputs[0], layer(x, x, x, need_weights=need_weights)[0])
    assert torch.equal(state, torch.random.get_rng_state())
    layer.dropout = 0.0
    expected = layer(x, x, x)[0]
    with KeyedDropout(make_key()):
        assert torch.allclose(layer(x, x, x)[0], expected, atol=1e-6)


def test_bernoulli_that_cannot_be_written_under_vmap_is_never_uninitialized() -> None:
    zero = torch.tensor(0)

    def noise(client: Tensor) -> tuple[Tensor, Tensor]:
        target = torch.empty(8)
        key = StepKey(seed_words(0), zero, client, zero)
        with KeyedDropout(key, is_mapped=True):
            result = target.bernoulli_(0.5)
        return result, target + 0 * client

    result, target = torch.func.vmap(noise)(torch.arange(3))
    assert set(result.flatten().tolist()) == {0, 1}
    assert bool(target.isnan().all())


@pytest.mark.parametrize("algorithm", [Algorithm(), FedCOG(count=8, steps=2, start_round=0)])
def test_loop_and_vmap_draw_the_same_masks(algorithm: Algorithm) -> None:
    network = USER_MODELS["dropout"]
    loop = ToyFederation(algorithm, "loop", module=network)
    vmap = ToyFederation(algorithm, "vmap", module=network)
    assert loop.model.uses_dropout
    assert max_difference(loop.final_state(), vmap.final_state()) < 1e-12


def test_second_gradient_of_a_step_sees_the_same_masks() -> None:
    """SAM without a perturbation is SGD, also with dropout."""
    network = USER_MODELS["dropout"]
    plain = ToyFederation(Algorithm(), module=network).final_state()
    sam = ToyFederation(FedSAM(rho=0.0), module=network).final_state()
    assert max_difference(plain, sam) == 0


class TeacherProbe(Algorithm):
    """Compares the ways to compute outputs within a step."""

    def penalty(
        self, params: Params, outputs: State, batch: State, client: ClientContext
    ) -> Tensor:
        x = batch["x"]
        teacher = client.teacher_logits(x)
        weights = client.broadcast["params"] | client.broadcast["buffers"]
        assert torch.equal(teacher, client.model.predict(weights, x)) and not teacher.requires_grad
        again = client.forward(params, x).logits
        assert torch.equal(again, outputs["logits"])
        assert not torch.equal(client.logits(params, x), again)
        return super().penalty(params, outputs, batch, client)


def test_teacher_has_no_dropout_and_further_passes_have_other_masks() -> None:
    network = USER_MODELS["dropout"]
    plain = ToyFederation(Algorithm(), module=network).final_state()
    probed = ToyFederation(TeacherProbe(), module=network).final_state()
    assert max_difference(plain, probed) == 0


def test_pass_without_a_key_is_refused() -> None:
    model = Model(USER_MODELS["dropout"](), (1, 8, 8), 4)
    x = torch.zeros(2, 1, 8, 8)
    with pytest.raises(ModelError, match=r"call client\.forward"):
        model.forward(model.params, model.buffers, x)
    model.forward(model.params, model.buffers, x, trial_key(x.device))
    assert torch.equal(
        model.predict(model.params | model.buffers, x),
        model.predict(model.params | model.buffers, x),
    )
