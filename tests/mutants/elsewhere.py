"""Bugs seeded in what other places need: an installed package, Windows, an Apple GPU."""

from __future__ import annotations

from mutant import Mutant

PORTABILITY = "tests/test_portability.py"
SHIPPED = "tests/config/test_shipped.py"

ELSEWHERE = [
    Mutant(
        name="configs-of-the-neighbor",
        file="rlhf/config/files.py",
        before="for folder in (PACKAGE / CONFIGS, PACKAGE.parent / CONFIGS):",
        after="for folder in (PACKAGE.parent / CONFIGS, PACKAGE / CONFIGS):",
        why="an installed program reads site-packages/configs, which is somebody else's",
        tests=(f"{SHIPPED}::test_an_installed_package_has_its_own_inside",),
    ),
    Mutant(
        name="shipped-configs-first",
        file="rlhf/config/files.py",
        before="if file.exists() or not _is_shipped_name(file):",
        after="if not _is_shipped_name(file):",
        why="a user's own configs/ppo.yaml is passed over for the project's",
        tests=(f"{SHIPPED}::test_the_working_folder_comes_first",),
    ),
    Mutant(
        name="alarm-on-windows",
        file="rlhf/rewards/function.py",
        before=' or not hasattr(signal, "setitimer")',
        after="",
        why="on Windows a time limit on a reward function ends in an AttributeError",
        tests=(f"{PORTABILITY}::test_without_a_timer_signal_a_thread_keeps_the_time",),
    ),
    Mutant(
        name="folders-flushed-on-windows",
        file="rlhf/tracking/checkpoint.py",
        before="    if IS_WINDOWS:  # a folder cannot be opened there",
        after="    if False:",
        why="on Windows every checkpoint ends in a PermissionError",
        tests=(f"{PORTABILITY}::test_a_checkpoint_is_flushed_where_folders_cannot_be_opened",),
    ),
    Mutant(
        name="float64-on-mps",
        file="rlhf/batching.py",
        before="return values.to(widest_dtype(device)) if values.dtype == torch.float64 else values",
        after="return values",
        why="pairs with reference log-probabilities, which are float64, cannot be moved to an Apple GPU",
        tests=("tests/algo/test_without_float64.py",),
    ),
    Mutant(
        name="mps-chosen-by-itself",
        file="rlhf/runtime/device.py",
        before='torch.device("cuda" if torch.cuda.is_available() else "cpu")',
        after='torch.device("mps" if torch.backends.mps.is_available() else "cpu")',
        why="a run moves to a device that nobody has tried",
        tests=("tests/runtime/test_device.py::test_the_device_that_is_meant",),
    ),
]
