"""TensorBoard: event files in the run directory, for `tensorboard --logdir RUNS`."""

from pathlib import Path

from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from fedcog.runs.config.experiment import Experiment
from fedcog.runs.tracking.tracker import RunStatus, Tracker
from fedcog.runs.tracking.values import flat_settings

FOLDER = "tensorboard"


class TensorBoard(Tracker):
    """Logs scalars and images by round, and settings as hyperparameters and as TOML."""

    def open(self, path: Path, experiment: Experiment, run_id: str, last_round: int) -> None:
        """Open the event files.

        Args:
            path: The run directory.
            experiment: The experiment.
            run_id: The folder's name, if the run was logged before.
            last_round: The last round that was logged.
        """
        is_new = run_id != FOLDER or not (path / FOLDER).is_dir()
        self.run_id = FOLDER
        self.last_round = 0 if is_new else last_round
        # Readers drop later rounds of a killed session, which could not store them.
        self.writer = SummaryWriter(str(path / FOLDER), purge_step=self.last_round + 1)
        if is_new:
            metrics = {"loss": 0.0, "accuracy": 0.0}
            summaries = hparams(flat_settings(experiment), metrics)  # type: ignore[no-untyped-call]
            for summary in summaries:  # SummaryWriter.add_hparams would create another run
                self.writer._get_file_writer().add_summary(summary)  # type: ignore[no-untyped-call]
            self.writer.add_text("experiment", f"```toml\n{experiment.to_toml()}\n```", 0)
            self.writer.flush()

    def log(self, round: int, metrics: dict[str, float], image: Tensor | None) -> None:
        """Write a round's scalars and image, and flush them.

        Args:
            round: The round, from 1.
            metrics: Values by name.
            image: `(3, H, W)`, uint8.
        """
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, round)
        if image is not None:
            self.writer.add_image("generated", image, round)
        self.writer.flush()

    def close(self, status: RunStatus) -> None:
        """Close the file; TensorBoard has no status of a run."""
        self.writer.close()
