"""A run in TensorBoard: event files in its directory, for `tensorboard --logdir RUNS`."""

from pathlib import Path

from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from fedcog.experiments.config import Experiment
from fedcog.experiments.track.tracking import End
from fedcog.experiments.track.values import settings

FOLDER = "tensorboard"


class TensorBoard:
    """Scalars and images by round; settings as hyper-parameters, and as the TOML file that they are."""

    def __init__(self, path: Path, experiment: Experiment, run: str, told: int) -> None:
        new = run != FOLDER or not (path / FOLDER).is_dir()
        self.run, self.told = FOLDER, 0 if new else told
        # Readers drop what an earlier session wrote of later rounds: it was killed before it could note them.
        self.writer = SummaryWriter(str(path / FOLDER), purge_step=self.told + 1)
        if new:
            parts = hparams(settings(experiment), {"loss": 0.0, "accuracy": 0.0})  # type: ignore[no-untyped-call]
            for part in parts:  # the writer's own method would put them into a run beside this one
                self.writer._get_file_writer().add_summary(part)  # type: ignore[no-untyped-call]
            self.writer.add_text("experiment", f"```toml\n{experiment.to_toml()}\n```", 0)
            self.writer.flush()

    def tell(self, round: int, numbers: dict[str, float], picture: Tensor | None) -> None:
        """Add a round's scalars and image, and flush them."""
        for name, number in numbers.items():
            self.writer.add_scalar(name, number, round)
        if picture is not None:
            self.writer.add_image("generated", picture, round)
        self.writer.flush()

    def close(self, end: End) -> None:
        """Close the file; TensorBoard knows no end of a run."""
        self.writer.close()
