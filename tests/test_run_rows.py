"""The rows that the script's process notes: from the host, and from a device."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mechanic.run import record
from mechanic.run.rows import HistoryRow, unpack
from mechanic.run.settings import RunSettings
from mechanic.run.spool import Spool
from mechanic.torch import mechanize
from mechanic.torch.attach import MECHANISM


def test_rows_gathered_on_a_device_are_the_rows_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 0.0)  # that a slow machine copies no earlier
    monkeypatch.setattr(record, "time", clock)
    weights = nn.Parameter(torch.ones(3))
    groups = [{"params": [weights], "lr": torch.tensor(0.25)}]
    optimizer = mechanize(torch.optim.AdamW(groups))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 2.0})
    kept: list[HistoryRow] = []
    device = record._DeviceRows(lambda step, data: kept.extend(unpack(data)[0]))
    expected = []
    for step in range(1, 101):
        weights.grad = weights.detach() - 2
        optimizer.step()
        mechanism = getattr(optimizer, MECHANISM)
        lrs = [group["lr"] for group in optimizer.param_groups]
        device.add(step, step / 2, mechanism, lrs)
        numbers = mechanism.scalars.read()
        scales = float(numbers.scale), float(numbers.mean_scale)
        parts = (0.25, 2.0), tuple(numbers.state.s.tolist())
        expected.append(HistoryRow(step, step / 2, *scales, 0, *parts))
        mechanism.scalars.packed = mechanism.scalars.packed.clone()
    assert len(kept) == 64  # the rest waits
    device._finish()
    assert kept == expected
    assert kept[-1].scale > kept[0].scale


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("mechanized", [True, False])
def test_a_spool_has_every_step(device: str, mechanized: bool, tmp_path: Path) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    weights = nn.Parameter(torch.ones(3, device=device))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW([weights], lr=torch.tensor(0.1))
    if mechanized:
        optimizer = mechanize(optimizer)
    settings = RunSettings(spool=str(tmp_path))
    recorder = record.Recorder(settings, optimizer, "AdamW", "tuned" if mechanized else "dry", "")
    spool = Spool(str(tmp_path))
    for step in range(1500):
        if step < 40 or step % 10 == 9:  # the others are noted as they are
            weights.grad = weights.detach() - 2
            optimizer.step()
        recorder.record_step(optimizer)
    if recorder._device_rows is not None:
        recorder._device_rows._finish()
    spool.poll()
    (history,) = spool.histories
    assert history.steps == 1500
    history.close()
    steps = [row.step for row in history.rows]
    assert steps == [*range(1, 1001), *range(1010, 1501, 10)]
    assert {row.lr for row in history.rows} == {(float(torch.tensor(0.1)),)}
    if mechanized:
        assert history.rows[-1].scale == float(getattr(optimizer, MECHANISM).scale)
        assert history.rows[-1].scale > history.rows[0].scale > 0


def test_a_row_half_written_waits_for_the_rest() -> None:
    row = HistoryRow(7, 1.0, 0.5, 0.25, 0, (0.1,), (0.5,))
    data = record.pack(*row)
    for size in range(len(data)):
        assert unpack(data + data[:size]) == ([row], len(data))
    torn = data[:-8] + record.pack(*row._replace(step=8))[-8:]  # the last row, being replaced
    assert unpack(torn) == ([], 0)
