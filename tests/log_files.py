"""What loggers have written, read back from their own files."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from mechanic.torch import tuner
from mechanic.torch.attach import is_mechanized

_WANDB_HEADER, _WANDB_BLOCK = 7, 32768


def watch(optimizer: Optimizer) -> dict[int, tuple[float, list[float]]]:
    """The scale, and the learning rate of each group, in each step, noted by the optimizer's own
    hook."""
    noted: dict[int, tuple[float, list[float]]] = {}

    def note(stepped: Optimizer, *_: Any) -> None:
        if is_mechanized(stepped):
            handle = tuner(stepped)
            scale = float(handle.scale)
            rates = [scale * group["lr"] for group in stepped.param_groups]
            noted[int(handle.metrics()["steps"])] = scale, rates

    optimizer.register_step_post_hook(note)
    return noted


def tensorboard_scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Every scalar of the event files below a folder, by name and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = (path for path in folder.rglob("events.*") if path.is_file())
    events = EventAccumulator(str(file)).Reload()
    return {
        name: {event.step: event.value for event in events.Scalars(name)}
        for name in events.Tags()["scalars"]
    }


def mlflow_history(uri: str, experiment: str, name: str) -> dict[int, float]:
    """A metric of the only run of an experiment."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return {item.step: item.value for item in client.get_metric_history(run.info.run_id, name)}


def wandb_history(folder: Path, name: str, step: str = "_step") -> dict[int, float]:
    """A metric of the only offline run below a folder."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its process may be writing still when a run has ended
    (file,) = folder.rglob("*.wandb")
    found = {}
    for data in _wandb_records(file.read_bytes()):
        items = Record.FromString(data).history.item
        row = {item.key or "/".join(item.nested_key): item.value_json for item in items}
        if name in row:
            found[json.loads(row[step])] = json.loads(row[name])
    return found


def _wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of LevelDB's log format, in blocks, behind a header."""
    place, parts = _WANDB_HEADER, b""
    while place < len(data):
        left = _WANDB_BLOCK - place % _WANDB_BLOCK
        if left < 7:  # a block ends in zeros where no head of a record fits
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""
