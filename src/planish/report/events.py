"""The run's metrics as TensorBoard events; the one place that needs the package."""

from contextlib import suppress
from pathlib import Path

from planish.errors import UsageError, WorldFailed
from planish.report.record import RunRecord, is_number

_FILE = "events.out.tfevents.planish"


def write_events(record: RunRecord, folder: Path) -> Path:
    """Write every number of `metrics.jsonl` under its key into one event file in `folder`, and return the file.

    Written again it replaces the one before, so that TensorBoard shows each step once. The last event carries the
    time at which `metrics.jsonl` was last written, those before it are earlier by the seconds of the steps between.

    Raises:
        UsageError: TensorBoard is not installed.
        WorldFailed: The disk refuses.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise UsageError(
            "`--tensorboard` needs the package tensorboard; install it with `pip install 'planish[tensorboard]'`."
        ) from error
    metrics = record.path / "metrics.jsonl"
    path, new = folder / _FILE, folder / ".planish.new"  # a name without "tfevents": TensorBoard leaves it alone
    try:
        ended_s = metrics.stat().st_mtime if metrics.is_file() else 0.0
        at_s = ended_s - sum(seconds for _, seconds in record.series("step_s"))
        folder.mkdir(parents=True, exist_ok=True)
        with new.open("wb") as file:
            writer = RecordWriter(file)
            writer.write(Event(wall_time=at_s, file_version="brain.Event:2").SerializeToString())
            for line in record.metrics:
                at_s += line["step_s"] if is_number(line.get("step_s")) else 0.0
                values = [
                    Summary.Value(tag=key, simple_value=value)
                    for key, value in line.items()
                    if key != "step" and is_number(value)
                ]
                event = Event(wall_time=at_s, step=line["step"], summary=Summary(value=values))
                writer.write(event.SerializeToString())
        new.replace(path)
    except OSError as error:
        with suppress(OSError):
            new.unlink()
        raise WorldFailed(
            f"writing {path} failed: {error.strerror}; make room, or leave out `--tensorboard`."
        ) from error
    return path
