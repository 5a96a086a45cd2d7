"""Studies that vary or inspect one thing: Tables 4, 6, 7, 8, 10 and 11, and the figures."""

from typing import Any, NamedTuple

from fedcog.algorithms import Algorithm, FedCOG
from fedcog.runs.config.composition import make_algorithm
from fedcog.runs.config.experiment import Experiment
from fedcog.studies.paper import numbers
from fedcog.studies.paper.comparisons import main_comparison
from fedcog.studies.paper.experiments import (
    CIFAR10_NIID1,
    CIFAR10_NIID2,
    LOSS_CONTROL,
    METHOD_NAMES,
    SETTINGS,
    WRAPPED_METHODS,
    StartedExperiment,
    experiment,
    fedcog_around,
    method,
)
from fedcog.studies.paper.numbers import parse_numbers
from fedcog.studies.study import (
    WARM_START_ROUNDS,
    Cell,
    CellMetric,
    Study,
    WarmStart,
    warm_start_of,
)


class RowAfterFedAvg(NamedTuple):
    """One round of a method after 50 rounds of FedAvg: four consecutive fields of a `Cell`."""

    row: str
    experiment: Experiment
    warm_start: WarmStart
    paper: float


def _one_round_after_fedavg() -> list[RowAfterFedAvg]:
    """One round of four methods after 50 rounds of FedAvg, as in the paper's analysis.

    A dormant FedCOG is wrapped around the other methods: it makes clients keep their local models.
    """
    changes = {"rounds": WARM_START_ROUNDS + 1, "evaluate_local": True}
    algorithms: dict[str, Algorithm] = {}
    for name in ("fedavg", "fedprox", "moon"):
        algorithms[METHOD_NAMES[name]] = FedCOG(
            make_algorithm(name), start_round=WARM_START_ROUNDS + 1, weighting="balanced"
        )
    algorithms["FedCOG"] = FedCOG(Algorithm(), weighting="balanced")
    warm_start = warm_start_of(Algorithm())
    rows = []
    for row, algorithm in algorithms.items():
        last_round = experiment(CIFAR10_NIID1, algorithm, **changes)
        accuracy = numbers.ACCURACY_AFTER_51_ROUNDS[row]
        rows.append(RowAfterFedAvg(row, last_round, warm_start, accuracy))
    return rows


def training_time() -> Study:
    """Table 4: a client's time in 51 rounds, and the accuracy it buys."""
    block = "Seconds of a client"
    cells = []
    for row, last_round, warm_start, _ in _one_round_after_fedavg():
        metric: CellMetric = "seconds_all_rounds" if row in ("FedProx", "MOON") else "seconds"
        seconds = Cell(
            block,
            row,
            last_round,
            warm_start,
            *numbers.CLIENT_SECONDS[row],
            metric=metric,
            probe="client-time",
        )
        cells.append(seconds)
        if row == "FedCOG":
            in_every_round = seconds._replace(
                row="FedCOG in every round",
                paper=None,
                paper_std=None,
                metric="seconds_all_rounds",
            )
            cells.append(in_every_round)
    cells += [Cell("Accuracy after 51 rounds", *row) for row in _one_round_after_fedavg()]
    return Study(
        name="time",
        title="Training time",
        source="Table 4",
        description=(
            "51 rounds. A client's time is that of a cohort of one, mean and deviation over the "
            "ten clients: of FedAvg, FedProx and MOON all rounds are their own, of FedCOG the "
            "last one after 50 of FedAvg, and beside it what 51 of FedCOG would take. The "
            "accuracies are those of 50 rounds of FedAvg and one of each method."
        ),
        cells=tuple(cells),
    )


def model_analysis() -> Study:
    """Figure 2: what one round does to each client's model."""
    global_block = "The global model"
    blocks: dict[str, CellMetric] = {
        "Distance of local models to their mean": "distance_to_mean",
        "Local models on the whole test set": "local_accuracy",
        "Local models on their clients' labels": "own_label_accuracy",
    }
    control = fedcog_around(
        CIFAR10_NIID1,
        options={"control": "loss"},
        rounds=WARM_START_ROUNDS + 1,
        evaluate_local=True,
    )
    cells = [
        Cell(global_block, *row) for row in _one_round_after_fedavg() if row.row != "MOON"
    ]  # the paper's figure has no MOON
    cells.append(Cell(global_block, LOSS_CONTROL, *control))
    cells += [
        cell._replace(block=block, metric=metric, paper=None)
        for block, metric in blocks.items()
        for cell in cells
    ]
    return Study(
        name="analysis",
        title="Model difference, generalisation and personalisation",
        source="Figure 2",
        description=(
            "50 rounds of FedAvg, then one round of each method: how far local models are from "
            "the global one, how good they are on the whole test set, and on their client's own "
            "mix of labels, mean over the ten clients. The control generates nothing and only "
            "gives the real loss the share that balanced weighting leaves it. The paper shows "
            "dots without numbers; in the figure are the clients of seed 0."
        ),
        cells=tuple(cells),
        figure="clients",
    )


def heterogeneity() -> Study:
    """Figure 3a: four levels of heterogeneity."""
    cells = [
        Cell(f"{beta:g}", row, *started)
        for beta in (0.1, 0.5, 1.0, 5.0)
        for row, started in _four_methods(beta=beta).items()
    ]
    return Study(
        name="heterogeneity",
        title="Heterogeneity levels",
        source="Figure 3a",
        description=(
            "70 rounds; CIFAR-10, Dirichlet partitions. The paper shows curves without numbers."
        ),
        cells=tuple(cells),
        figure="lines",
        axis="beta",
    )


def _four_methods(**changes: Any) -> dict[str, StartedExperiment]:
    """FedAvg, FedProx, MOON and FedCOG on CIFAR-10 NIID-1, by row."""
    methods = {
        METHOD_NAMES[name]: method(name, CIFAR10_NIID1, **changes)
        for name in ("fedavg", "fedprox", "moon")
    }
    methods["FedCOG"] = fedcog_around(CIFAR10_NIID1, **changes)
    return methods


def disagreement_weight() -> Study:
    """Figure 3b: the weight of disagreement."""
    return _loss_weight_study(
        name="lambda-dis",
        title="Disagreement: lambda_dis",
        source="Figure 3b",
        values=(0.01, 0.1, 1.0, 10.0),
    )


def distillation_weight() -> Study:
    """Figure 3c: the weight of distillation."""
    return _loss_weight_study(
        name="lambda-kd",
        title="Knowledge distillation: lambda_kd",
        source="Figure 3c",
        values=(0.001, 0.01, 0.1, 1.0),
        options={"weighting": "fixed"},
        remark=" Only under fixed weighting has lambda_kd a meaning.",
    )


def _loss_weight_study(
    name: str,
    title: str,
    source: str,
    values: tuple[float, ...],
    options: dict[str, Any] | None = None,
    remark: str = "",
) -> Study:
    """FedCOG with several values of the setting `name`."""
    setting_name = name.replace("-", "_")
    cells = []
    for value in values:
        for setting in (CIFAR10_NIID1, CIFAR10_NIID2):
            started = fedcog_around(setting, options=(options or {}) | {setting_name: value})
            cells.append(Cell(f"{value:g}", setting, *started))
    return Study(
        name=name,
        title=title,
        source=source,
        description=(
            f"50 rounds of FedAvg, then 20 of FedCOG.{remark} The paper shows curves without "
            "numbers."
        ),
        cells=tuple(cells),
        reference_row="",
        figure="lines",
        axis=setting_name,
    )


def local_iterations() -> Study:
    """Table 6: the number of local steps."""
    return Study(
        name="iterations",
        title="Local iterations",
        source="Table 6",
        description="CIFAR-10, NIID-1, 70 rounds.",
        cells=_varied_cells("local_steps", numbers.LOCAL_ITERATIONS),
        figure="lines",
        axis="tau",
    )


def participation() -> Study:
    """Table 7: the participation rate."""
    return Study(
        name="participation",
        title="Participation rate",
        source="Table 7",
        description="CIFAR-10, NIID-1, 70 rounds. 50 clients in all.",
        cells=_varied_cells("participation", numbers.PARTICIPATION, clients=50),
        figure="lines",
        axis="rate",
    )


def num_clients() -> Study:
    """Table 8: the number of clients."""
    return Study(
        name="clients",
        title="Number of clients",
        source="Table 8",
        description="CIFAR-10, NIID-1, 70 rounds.",
        cells=_varied_cells("clients", numbers.NUM_CLIENTS),
        figure="lines",
        axis="K",
    )


def _varied_cells(
    setting_name: str, published: dict[float, str], **changes: Any
) -> tuple[Cell, ...]:
    """Four methods with several values of one setting of the experiment."""
    cells = []
    for value, text in published.items():
        methods = _four_methods(**changes | {setting_name: value})
        for (row, started), paper in zip(methods.items(), parse_numbers(text), strict=True):
            cells.append(Cell(f"{value:g}", row, *started, paper))
    return tuple(cells)


def generation_steps() -> Study:
    """Table 10: the number of generation steps."""
    cells = []
    for num_steps, paper in numbers.GENERATION_STEPS.items():
        started = fedcog_around(CIFAR10_NIID1, options={"steps": num_steps})
        cells.append(Cell(f"{num_steps}", "FedCOG", *started, paper))
    return Study(
        name="steps",
        title="Generation steps",
        source="Table 10",
        description="CIFAR-10, NIID-1: 50 rounds of FedAvg, then 20 of FedCOG.",
        cells=tuple(cells),
        figure="lines",
        axis="generation steps",
    )


def generation_time() -> Study:
    """Table 11: the time of generation by number of inputs."""
    cells = []
    for count, paper in numbers.GENERATION_SECONDS.items():
        started = fedcog_around(
            CIFAR10_NIID1, options={"count": count}, rounds=WARM_START_ROUNDS + 1
        )
        cell = Cell(
            f"{count}", "FedCOG", *started, paper, metric="seconds", probe="generation-time"
        )
        cells.append(cell)
    return Study(
        name="generation-time",
        title="Generation time",
        source="Table 11",
        description=(
            "Seconds in which one client alone generates this number of inputs in 100 steps. The "
            "paper's local training took 14.81 s a round on its machine."
        ),
        cells=tuple(cells),
        seeds=(0,),
        figure="lines",
        axis="inputs",
    )


def data_distributions() -> Study:
    """Figure 4: examples per client and class under NIID-1."""
    cells = tuple(
        Cell(setting, "NIID-1", experiment(setting), probe="partition")
        for setting in SETTINGS
        if setting.endswith("NIID-1")
    )
    return Study(
        name="distributions",
        title="Data distributions",
        source="Figure 4",
        description="Examples per client and class, Dirichlet with beta 0.1, seed 0.",
        cells=cells,
        seeds=(0,),
        figure="partition",
    )


def generated_images() -> Study:
    """Figure 5: generated images and real ones."""
    started = fedcog_around(CIFAR10_NIID1, options={"steps": 1000}, rounds=WARM_START_ROUNDS + 1)
    return Study(
        name="pictures",
        title="Generated images",
        source="Figure 5",
        description=(
            "Inputs on their way from noise in round 51, one of each class, with real images of "
            "the class."
        ),
        cells=(Cell(CIFAR10_NIID1, "FedCOG", *started, probe="pictures"),),
        seeds=(0,),
        figure="pictures",
    )


def convergence_curves() -> Study:
    """Figure 6: accuracy by round, from runs of the main comparison."""
    blocks = ("Fashion-MNIST, NIID-1", "Fashion-MNIST, NIID-2", CIFAR10_NIID1, CIFAR10_NIID2)
    rows = {*(METHOD_NAMES[name] for name in WRAPPED_METHODS), "FedCOG"}
    cells = main_comparison().cells
    return Study(
        name="curves",
        title="Convergence curves",
        source="Figure 6",
        description=(
            "Runs of the main comparison; FedCOG wakes after round 50. The second figure is not "
            "in the paper."
        ),
        cells=tuple(cell for cell in cells if cell.block in blocks and cell.row in rows),
        figure="curves",
    )


def privacy() -> Study:
    """Appendix A.4.2: whether generated images reveal training images."""
    cells = tuple(
        Cell(
            setting,
            "FedCOG",
            *fedcog_around(setting, rounds=WARM_START_ROUNDS + 1),
            probe="privacy",
        )
        for setting in (CIFAR10_NIID1, CIFAR10_NIID2)
    )
    return Study(
        name="privacy",
        title="What generated images give away",
        source="Appendix A.4.2",
        description=(
            "The paper claims that generated images reveal no private detail. Here: the mean "
            "distance from every image generated in round 51 to the nearest training image of its "
            "class (a member), and to the nearest of as many test images; how often the member is "
            "the nearer one, and for comparison how often the nearer one is in the first of two "
            "halves of the test images; and how well an image's distance to the nearest generated "
            "one tells members from others (AUC, 0.5: not at all), beside the model's own loss on "
            "it."
        ),
        cells=cells,
        seeds=(0,),
        figure="privacy",
    )
