"""FedCOG's options, each seen to do what it says."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from fedcog import generators, streams, tree
from fedcog.algorithms import Algorithm, Batch, Draw, FedAvg, FedCOG, FedProx, Site
from fedcog.federation.course import Members
from fedcog.fitness import ModelError
from fedcog.models import Model, build
from fedcog.optimiser import Optimiser
from fedcog.testing import Small, several, vectors, worst
from fedcog.tree import Params
from tests.user_models import USER_MODELS, own_generator

COG = FedCOG(count=8, steps=4, start_round=0, lr=0.1)


def extra(algorithm: FedCOG, rounds: int = 1, **own: Any) -> tuple[Small, Site, Batch]:
    """What client 0 generates in the round after `rounds`."""
    small = Small(dataclasses.replace(algorithm, start_round=0), rounds=rounds, **own)
    small.run()
    backend, shared = small.backend, small.algorithm.broadcast(small.server)
    own = tree.stack([backend.kept(small.algorithm, shared, 0)])
    member = Members(
        torch.tensor(0),
        {"previous": {name: value[0] for name, value in own["previous"].items()}},
        backend.weights[0],
        backend.counts[0],
        backend.sizes[0],
        backend.steps[0],
    )
    course = backend.cohort.course(small.algorithm)
    fixed = {"shared": shared, "lr": torch.tensor(0.1, dtype=torch.float64), "round": torch.tensor(rounds)}
    site = course.site(member, fixed, shared["buffers"], torch.tensor(0))
    draws = tree.pick(backend.cohort.draws(algorithm, "client", rounds, torch.tensor([0])), 0)
    with torch.no_grad():
        draft = algorithm.draft(site, draws)
        for step in torch.arange(algorithm.redrafts(rounds)):
            draft = algorithm.redraft(draft, dataclasses.replace(site, step=step))
        return small, site, algorithm.extra_data(site, draft).groups["made"]


def test_the_teachers_outputs_belong_to_the_very_inputs() -> None:
    _, site, made = extra(COG)
    teacher: Params = site.shared["params"] | site.shared["buffers"]
    assert torch.equal(site.model.predict(teacher, made["x"]), made["logits"])


def test_after_a_round_the_previous_model_is_not_the_global_one_and_matters() -> None:
    _, site, made = extra(COG)
    assert worst(site.own["previous"], site.shared["params"] | site.shared["buffers"]) > 1e-4
    _, _, alone = extra(dataclasses.replace(COG, source="global"))
    assert float((made["x"] - alone["x"]).abs().max()) > 1e-6
    _, _, without = extra(dataclasses.replace(COG, lambda_dis=0.0))
    assert torch.equal(without["x"], alone["x"])


def test_source_noise_skips_the_optimisation() -> None:
    _, _, made = extra(dataclasses.replace(COG, source="noise"))
    number = torch.tensor([0])
    assert torch.equal(made["x"], streams.normal(3, "draw/noise", 1, number, (8, 1, 8, 8))[0].double())
    _, _, still = extra(dataclasses.replace(COG, steps=0))
    assert torch.equal(made["x"], still["x"])


def test_labels() -> None:
    small, site, made = extra(COG)
    chance = torch.zeros(8, 5)
    assert torch.equal(made["y"], small.task.targets(site.counts, site.sizes, "complementary", chance))
    _, _, made = extra(dataclasses.replace(COG, labels="uniform"))
    assert torch.bincount(made["y"], minlength=4).tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize(
    "change",
    [
        {"supervision": "hard"},
        {"weighting": "fixed", "lambda_kd": 0.5},
        {"source": "noise"},
        {"source": "global"},
        {"labels": "uniform"},
        {"steps": 1},
        {"count": 5},
        {"lambda_dis": 3.0},
        {"beta1": 0.0},
        {"beta2": 0.5},
        {"lr": 0.5},
        {"start_round": 1},
        {"generator": "conv"},
        {"control": "loss"},
        {"control": "lr"},
    ],
)
def test_every_option_changes_the_result(change: dict[str, object]) -> None:
    one = Small(COG).run()[-1].server["params"]
    other = Small(dataclasses.replace(COG, **change)).run()[-1].server["params"]  # type: ignore[arg-type]
    assert worst(one, other) > 1e-9


def test_the_generation_batch_does_not() -> None:
    one = Small(COG).run()[-1].server["params"]
    other = Small(dataclasses.replace(COG, generation_batch=3)).run()[-1].server["params"]
    assert worst(one, other) < 1e-12


def test_fixed_weighting_with_lambda_zero_is_the_inner_algorithm() -> None:
    bare = Small(FedProx()).run()[-1].server["params"]
    wrapped = Small(dataclasses.replace(COG, inner=FedProx(), weighting="fixed", lambda_kd=0.0))
    assert worst(bare, wrapped.run()[-1].server["params"]) < 1e-12


def test_shares_are_balanced_by_default_but_of_several_labels_fixed() -> None:
    for dataset, usual, other in ((None, "balanced", "fixed"), (several(), "fixed", "balanced")):
        ends = {
            how: Small(dataclasses.replace(COG, weighting=how), dataset=dataset).run()[-1].server["params"]  # type: ignore[arg-type]
            for how in ("auto", "balanced", "fixed")
        }
        assert worst(ends["auto"], ends[usual]) == 0 < worst(ends["auto"], ends[other])


def test_hard_supervision_is_cross_entropy_with_the_teachers_decision() -> None:
    small, site, made = extra(dataclasses.replace(COG, supervision="hard", weighting="fixed", lambda_kd=1.0))
    algorithm = dataclasses.replace(COG, supervision="hard", weighting="fixed", lambda_kd=1.0)
    params = {name: value + 0.1 for name, value in site.shared["params"].items()}
    real = small.data.examples(torch.arange(6))
    both = algorithm.local_loss(params, {**real, "made": made}, site)
    logits = site.model.predict(params, made["x"])
    hard = torch.nn.functional.cross_entropy(logits, made["logits"].argmax(-1))
    plain = FedAvg().local_loss(params, real, site)
    assert both.item() == pytest.approx((plain + hard).item(), rel=1e-12)


def test_the_controls_are_the_real_share_and_nothing_else() -> None:
    """Without weight decay a factor on the loss is one on the learning rate, and both are FedAvg with a smaller one."""
    one: dict[str, Any] = {"sizes": (50,), "rounds": 2, "optimiser": Optimiser(momentum=0.9, weight_decay=0.0)}
    small = Small(FedAvg(), **one)
    counts = small.backend.counts[0]
    share = int(counts.sum()) / int(counts.max() * len(counts))
    assert 0 < share < 0.9
    slower = Small(FedAvg(), lr=0.05 * share, **one).run()[-1].server["params"]
    for control in ("loss", "lr"):
        algorithm = dataclasses.replace(COG, control=control)  # type: ignore[arg-type]
        assert worst(Small(algorithm, **one).run()[-1].server["params"], slower) < 1e-12


def test_a_generator_learns_to_make_inputs_that_convince() -> None:
    conv = dataclasses.replace(COG, generator="conv", steps=12, lr=0.01, count=16)
    _, site, made = extra(conv)
    _, _, first = extra(dataclasses.replace(conv, steps=0))
    assert made["x"].shape == (16, 1, 8, 8)
    assert float(made["x"].mean()) == pytest.approx(0, abs=1e-6) and float(made["x"].std()) == pytest.approx(
        1, rel=0.01
    )
    teacher: Params = site.shared["params"] | site.shared["buffers"]
    assert torch.equal(site.model.predict(teacher, made["x"]), made["logits"])
    losses = [float(site.task.loss(one["logits"], one["y"]).mean()) for one in (first, made)]
    assert losses[1] < losses[0] - 0.01


def test_a_generator_is_refused_where_inputs_are_no_images() -> None:
    with pytest.raises(ModelError, match="the inputs here are none"):
        Small(dataclasses.replace(COG, generator="conv"), dataset=vectors(), module=nn.Linear(5, 4), sizes=(30,)).run()


OWN = dataclasses.replace(COG, generator="custom", noise=5)


def test_a_generator_of_ones_own_begins_with_its_weights_and_learns_in_every_client_anew() -> None:
    generator = generators.usable(own_generator(), 5, (1, 8, 8))
    small, _, first = extra(dataclasses.replace(OWN, steps=0), generator=generator)
    noise = streams.normal(3, "draw/noise", 1, torch.tensor([0]), (8, 5))[0].double()
    plain = own_generator(dropout=0.0).double()
    assert float((first["x"] - plain.train()(noise).detach()).abs().max()) < 1e-12  # BatchNorm over the batch
    small, site, made = extra(OWN, generator=generator)
    losses = [float(site.task.loss(one["logits"], one["y"]).mean()) for one in (first, made)]
    assert losses[1] < losses[0] - 0.01
    assert small.model.generator is not None
    begun = small.model.generator.state_dict()  # is what it was, after two rounds of learning
    assert all(torch.equal(value.double(), begun[name]) for name, value in generator.state_dict().items())


def test_frozen_weights_of_a_generator_stay() -> None:
    frozen = nn.Sequential(nn.Linear(5, 64, bias=False).requires_grad_(False), nn.Unflatten(1, (1, 8, 8)))
    free = copy.deepcopy(frozen).requires_grad_()
    residuals = []
    for generator in (frozen, free):
        _, _, made = extra(OWN, generator=generator)
        basis = frozen[0].weight.detach().double()
        rest = made["x"].flatten(1).T
        residuals.append(float((rest - basis @ torch.linalg.lstsq(basis, rest).solution).abs().max()))
    assert residuals[0] < 1e-9 < 1e-3 < residuals[1]


@pytest.mark.parametrize("generator", ["none", "conv", "custom"])
def test_statistics_and_generators_together_as_alone(generator: str) -> None:
    algorithm = dataclasses.replace(COG, generator=generator, noise=5, lambda_bn=0.5)
    own: dict[str, Any] = {"module": USER_MODELS["batch-norm"]()}
    own |= {"generator": generators.usable(own_generator(), 5, (1, 8, 8))} if generator == "custom" else {}
    one, other = (Small(algorithm, mapping, **own).everything() for mapping in ("loop", "vmap"))  # type: ignore[arg-type]
    assert worst(one, other) < 1e-9
    assert worst(one, Small(dataclasses.replace(algorithm, lambda_bn=0.0), **own).everything()) > 1e-6


def test_with_running_statistics_there_is_nothing_to_distil_before_the_first_step() -> None:
    """As the paper's lemma has it; normalised by their own batch, the same inputs have other outputs."""
    found = {}
    for norms in ("batch", "running"):
        algorithm = dataclasses.replace(COG, norms=norms)
        small, site, made = extra(algorithm, module=USER_MODELS["batch-norm"]())
        site = dataclasses.replace(site, buffers=site.shared["buffers"])
        outputs = algorithm.outputs(
            site.shared["params"], small.data.examples(torch.arange(6)) | {"made": made}, site.still
        )
        teacher = site.model.predict(site.shared["params"] | site.shared["buffers"], made["x"])
        assert torch.equal(made["logits"], teacher)
        found[norms] = float(small.task.distil(teacher, outputs["made"]).mean())
    assert found["batch"] > 1e-3
    assert found["running"] < found["batch"] / 10  # the real batch has moved the statistics a little by then


def test_running_statistics_together_as_alone() -> None:
    own: dict[str, Any] = {"module": USER_MODELS["batch-norm"]()}
    one, other = (
        Small(dataclasses.replace(COG, norms="running"), mapping, **own).everything() for mapping in ("loop", "vmap")
    )
    assert worst(one, other) < 1e-9
    assert worst(one, Small(COG, **own).everything()) > 1e-6
    plain = [Small(dataclasses.replace(COG, norms=norms)).everything() for norms in ("batch", "running")]
    assert worst(*plain) == 0  # of a network without BatchNorm


def test_what_a_network_lacks_is_said() -> None:
    with pytest.raises(ModelError, match="this network has none: set it to 0"):
        Small(dataclasses.replace(COG, lambda_bn=0.5), module=build("resnet18-gn", (1, 8, 8), 4, seed=0))
    with pytest.raises(ModelError, match="8 inputs are no whole batches of 3"):
        Small(
            dataclasses.replace(COG, lambda_bn=0.5, generation_batch=3), module=build("resnet18", (1, 8, 8), 4, seed=0)
        )
    with pytest.raises(ModelError, match="give it from Python"):
        Small(OWN)
    assert len(Model(build("resnet18", (1, 8, 8), 4, seed=0), (1, 8, 8), 4).batch_norms) == 20


class Doubled(nn.Linear):
    """A generator in another precision."""

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return super().forward(noise).reshape(-1, 1, 8, 8).double()


class CalledX(nn.Module):
    """A generator whose weights have the name that inputs have elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.ones(5, 64))

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return (noise @ self.x).reshape(-1, 1, 8, 8)


def test_the_weights_of_a_generator_may_have_any_name() -> None:
    linear = nn.Sequential(nn.Linear(5, 64, bias=False), nn.Unflatten(1, (1, 8, 8)))
    nn.init.ones_(linear[0].weight)
    made = [extra(OWN, generator=generators.usable(one, 5, (1, 8, 8)))[2]["x"] for one in (CalledX(), linear)]
    assert float((made[0] - made[1]).abs().max()) < 1e-9


@pytest.mark.parametrize(
    ("generator", "why"),
    [
        (nn.Linear(5, 64), r"for noise of shape \(4, 5\) the generator gave \(4, 64\), and inputs .* \(4, 1, 8, 8\)"),
        (nn.Linear(6, 64), r"does not take noise of shape \(4, 5\).*Set fedcog.noise"),
        (nn.Linear, "is not an nn.Module: give an instance"),
        (Doubled(5, 64), "gave torch.float64, and inputs are torch.float32"),
    ],
)
def test_generators_that_cannot_work_are_refused(generator: nn.Module, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        generators.usable(generator, 5, (1, 8, 8))


def test_a_generator_that_normalises_over_the_batch_needs_two_inputs() -> None:
    normal = nn.Sequential(nn.Linear(5, 64), nn.BatchNorm1d(64), nn.Unflatten(1, (1, 8, 8)))
    with pytest.raises(ModelError, match=r"no input alone.*Set fedcog.count to 2"):
        extra(dataclasses.replace(OWN, count=1), generator=generators.usable(normal, 5, (1, 8, 8)))
    _, _, made = extra(dataclasses.replace(OWN, count=2), generator=generators.usable(normal, 5, (1, 8, 8)))
    assert bool(made["x"].isfinite().all())


def test_a_generator_with_random_numbers_of_its_own_is_refused() -> None:
    class Random(nn.Module):
        def forward(self, noise: torch.Tensor) -> torch.Tensor:
            return noise + torch.rand(noise.shape)

    with pytest.raises(ModelError, match="random numbers of its own"):
        generators.usable(Random(), 5, (5,))


def test_the_papers_generator_is_the_same_as_a_network() -> None:
    """With the weights that a client draws, given as a network's, it makes the same images."""
    conv = dataclasses.replace(COG, generator="conv", noise=7, steps=0)
    network = generators.ConvGenerator((1, 8, 8), noise=7)
    numbers = streams.normal(3, "draw/generator", 1, torch.tensor([0]), (sum(p.numel() for p in network.parameters()),))
    network.double().load_state_dict(generators.conv_weights(numbers[0].double(), (1, 8, 8), 7))
    _, _, drawn = extra(conv)
    _, _, given = extra(conv, generator=network)
    assert torch.equal(drawn["x"], given["x"])


def test_the_payload_is_fedavgs_byte_for_byte_in_shape_and_name() -> None:
    def payload(algorithm: Algorithm) -> dict[str, tuple[int, ...]]:
        small = Small(algorithm, rounds=1)
        total = small.backend.gather(algorithm, algorithm.broadcast(small.server), [0, 1, 2], 0, 0.1, None).total
        return {name: tuple(value.shape) for name, value in tree.flatten(total).items()}

    assert payload(COG) == payload(FedAvg())


def test_the_exhibit_shows_the_inputs_that_were_used() -> None:
    small = Small(COG, rounds=1)
    shown = small.run()[-1].exhibit
    assert shown["steps"].tolist() == [0, 1, 2, 3, 4]
    assert shown["images"].shape == (5, 8, 1, 8, 8)
    assert not Small(dataclasses.replace(COG, start_round=5)).run()[-1].exhibit


@dataclasses.dataclass(frozen=True)
class Redrafting(Algorithm):
    """Has drafts of its own, improved five times."""

    def draws(self, round, model, batch_size):  # type: ignore[no-untyped-def]
        return {"z": Draw((2,))}

    def redrafts(self, round: int) -> int:
        return 5

    def redraft(self, draft, site):  # type: ignore[no-untyped-def]
        return draft | {"z": torch.where(site.step < 5, draft["z"] + 1, draft["z"])}


@pytest.mark.parametrize("source", ["noise", "global+local"])
def test_each_algorithm_improves_its_drafts_as_often_as_it_says(source: str) -> None:
    cog = dataclasses.replace(COG, source=source)
    _, _, alone = extra(cog)
    _, _, around = extra(dataclasses.replace(cog, inner=Redrafting()))
    assert torch.equal(alone["x"], around["x"])
