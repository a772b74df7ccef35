"""Damage to checkpoints, a full disk, a second process: refused or survived, and said aloud."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from lock_holder import HOLD, held_elsewhere
from runs import brief_tree, largest_difference, online, trained, weights

from rlhf.errors import CheckpointError, SamplingError
from rlhf.sampling.push import WeightFolders
from rlhf.tracking.checkpoint import MANIFEST, Checkpoints, find_damage, replace_folder
from rlhf.tracking.run_folder import FolderLock, RunFolder
from rlhf.tracking.trackers import JsonlLogger, read_jsonl
from rlhf.training.online import train


def writer(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "weights").write_text(text)
        (folder / "state.json").write_text("{}")

    return write


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Inside, no file can grow past `size` bytes: like a full disk, without filling one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_flipped_bit_of_any_byte_is_found(tmp_path: Path) -> None:
    """Of the manifest too: it is never read as another one, and never an exception."""
    checkpoint = Checkpoints(tmp_path, keep=1).save(1, writer("w"))
    for file in [path for path in checkpoint.rglob("*") if path.is_file()]:
        whole = file.read_bytes()
        name = file.relative_to(checkpoint).as_posix()
        for place in range(len(whole)):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << place % 8
            file.write_bytes(bytes(flipped))
            damage = find_damage(checkpoint)
            if damage is None:  # white space of the manifest, at most
                assert name == MANIFEST
                assert json.loads(flipped) == json.loads(whole)
            else:
                assert name in damage
        file.write_bytes(whole)
    assert find_damage(checkpoint) is None


def test_every_shortened_file_is_found(tmp_path: Path) -> None:
    checkpoint = Checkpoints(tmp_path, keep=1).save(1, writer("some weights"))
    for file in [path for path in checkpoint.rglob("*") if path.is_file()]:
        whole = file.read_bytes()
        for size in range(len(whole)):
            file.write_bytes(whole[:size])
            assert file.name in (find_damage(checkpoint) or "")
        file.unlink()
        assert file.name in (find_damage(checkpoint) or "")
        file.write_bytes(whole)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """The folder of a run, which every test of damage leaves as it was, and its final weights."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, weights(trained(brief_tree(folder)).models.policy)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "half deleted"])
def test_a_run_goes_on_from_the_newest_whole_checkpoint(
    finished: tuple[Path, dict[str, torch.Tensor]], damage: str
) -> None:
    folder, whole = finished
    run = folder / "run"
    kept = {name: (run / name).read_bytes() for name in ("metrics.jsonl", "samples.jsonl")}
    notes_before = len(RunFolder(run).read_notes())
    last = run / "checkpoints" / "step-000004"
    model = last / "model" / "model.safetensors"
    match damage:
        case "truncated":
            model.write_bytes(model.read_bytes()[:-100])
        case "flipped":
            data = bytearray(model.read_bytes())
            data[len(data) // 2] ^= 1
            model.write_bytes(bytes(data))
        case "half deleted":
            shutil.rmtree(last / "model")
    resumed = trained(brief_tree(folder))
    notes = [row["text"] for row in RunFolder(run).read_notes()[notes_before:]]
    assert any("step-000004 is damaged (model/" in text and "passed over" in text for text in notes)
    assert any("continuing from" in text and "step-000002" in text for text in notes)
    assert largest_difference(whole, weights(resumed.models.policy)) == 0.0
    assert kept == {name: (run / name).read_bytes() for name in kept}
    assert find_damage(last) is None  # written again


def test_a_damaged_later_checkpoint_does_not_displace_the_good_ones(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    (checkpoints.save(4, writer("four")) / "state.json").unlink()
    checkpoints.save(3, writer("three"))  # the restart came from before 4
    assert [path.name for path in checkpoints.all()] == ["step-000003"]
    assert checkpoints.latest_intact(lambda _: None) is not None


def test_what_a_kill_left_is_swept_up(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    for name in (".writing-step-000001", ".deleting-step-000000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("half")
    checkpoints.save(2, writer("two"))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


@pytest.mark.parametrize("size", [100, 2_000, 8_000, 20_000])
def test_a_full_disk_leaves_the_older_checkpoint_and_says_so(tmp_path: Path, size: int) -> None:
    """The sizes make the tokenizer, the weights, the optimizers or the manifest fail: each library in its own way."""
    tree = brief_tree(tmp_path)
    run = online(tree)
    step = run.session.steps()
    run.session.checkpoint_every = 1
    folder = run.session.checkpoints.folder
    next(step)
    next(step)
    assert [path.name for path in run.session.checkpoints.all()] == ["step-000001"]
    run.session._saved_at = None
    message = r"cannot write .*MB free.*the same command continues"
    with files_of_at_most(size), pytest.raises(CheckpointError, match=message):
        run.session._checkpoint()
    assert [path.name for path in folder.iterdir()] == ["step-000001"]
    assert find_damage(folder / "step-000001") is None


def test_a_run_whose_disk_was_full_is_the_uninterrupted_one(
    tmp_path: Path, finished: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    folder, whole = finished
    tree = brief_tree(tmp_path)
    broken = online(tree)
    save = broken.session.save

    def full(folder: Path) -> None:
        if broken.session.state.step == 4:
            with files_of_at_most(5_000):
                save(folder)
        save(folder)

    broken.session.save = full
    with pytest.raises(CheckpointError, match="cannot write the checkpoint"):
        train(broken)
    broken.session.recorder.close()
    resumed = trained(tree)
    assert largest_difference(whole, weights(resumed.models.policy)) == 0.0
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (folder / "run" / name).read_bytes() == (tmp_path / "run" / name).read_bytes()


def test_a_line_that_does_not_fit_is_cut_off_at_the_restart(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    logger.log({"step": 1})
    with files_of_at_most(20), pytest.raises(CheckpointError, match=r"cannot write .*metrics\.jsonl"):
        logger.log({"step": 2, "more": "x" * 50})
    logger.close()
    assert (tmp_path / "metrics.jsonl").stat().st_size == 20
    with JsonlLogger(tmp_path / "metrics.jsonl") as again:
        again.log({"step": 2})
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "model"
    replace_folder(target, lambda folder: (folder / "weights").write_text("one"))

    def half(folder: Path) -> None:
        (folder / "weights").write_text("two")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left"):
        replace_folder(target, half)
    assert (target / "weights").read_text() == "one"
    replace_folder(target, lambda folder: (folder / "weights").write_text("three"))
    assert (target / "weights").read_text() == "three"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_second_process_is_refused_and_a_dead_one_is_no_trap(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path / "run") as pid, pytest.raises(CheckpointError) as error:
        online(brief_tree(tmp_path))
    assert f"in use by another process (pid {pid}): " in str(error.value)
    assert str(error.value).endswith("choose another run.out_dir")
    assert (tmp_path / "run" / ".lock").exists()
    assert trained(brief_tree(tmp_path, schedule={"steps": 1})).session.state.step == 1


def test_a_run_lets_go_of_its_folder(tmp_path: Path) -> None:
    run = online(brief_tree(tmp_path))
    again = FolderLock(tmp_path / "run")  # the same process may
    run.session.recorder.close()
    again.release()
    again.release()
    with held_elsewhere(tmp_path / "run"):
        pass


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    reader, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        os.read(reader, 1)  # lives on after the parent has let go
        os._exit(0)
    lock.release()
    with held_elsewhere(tmp_path):
        pass
    os.write(end, b"x")
    os.waitpid(child, 0)
    os.close(reader)
    os.close(end)


def test_without_locks_in_the_system_a_folder_is_used_unlocked(tmp_path: Path) -> None:
    """No fcntl: the module imports, as on Windows, and a file system that knows no locks stops no run."""
    program = f"import sys; sys.modules['fcntl'] = None; {HOLD}; lock.release(); lock.release()"
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], input="", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "held\n"), done.stderr
    FolderLock(tmp_path).release()


def test_other_optimizers_than_the_checkpoints_are_refused(tmp_path: Path) -> None:
    trained(brief_tree(tmp_path, schedule={"steps": 1}))
    tree = brief_tree(tmp_path, policy={"lora": {"r": 2}})
    with pytest.raises(Exception) as caught:
        online(tree)
    assert type(caught.value).__module__ == "rlhf.errors", caught.value


def test_the_checkpoint_has_every_generator_there_is(
    tmp_path: Path, finished: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    """None: no step reads a global generator, in any state."""
    _, whole = finished
    disturbed = online(brief_tree(tmp_path))
    sample = disturbed.sampler.sample

    def disturb(*args: object, **kwargs: object) -> object:
        torch.manual_seed(torch.randint(0, 2**31, ()).item())
        torch.rand(17)
        return sample(*args, **kwargs)  # type: ignore[arg-type]

    disturbed.sampler.sample = disturb  # type: ignore[method-assign, assignment]
    train(disturbed)
    assert largest_difference(whole, weights(disturbed.models.policy)) == 0.0


def test_a_push_to_servers_that_finds_no_room_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    """The run is saved then, perhaps on the same disk."""
    folders = WeightFolders(tmp_path)
    with files_of_at_most(1000), pytest.raises(SamplingError, match="cannot write the weights"):
        folders.write(
            "weights-000001-all",
            {"weight": torch.zeros(1000)},
            manifest={},
            is_adapter=False,
            write_config=lambda _: None,
        )
    assert not list(tmp_path.iterdir())
